"""The same requests, live on this machine's CPU server and simulated with this machine's profile.

python benchmarks/simulator_fidelity.py [--rounds N] [--seconds N] [--out FILE]

A server with small models runs a calibration load, then a segment of a real trace, then both again,
`rounds` times. Its record of the calibration loads alone becomes the simulator's profile
(`c2cserve calibrate`); the simulator gets the same requests. Other work on the machine changes how
long steps take: `drift` is what the steps of the segments took, over what the profile says of them.
`phases` has the same by kind of step, as medians: prompts, decodes by batch, and both in one step.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from catalogue_server import Server
from fidelity_models import TPOT_S, TTFT_S, make_catalog
from report import report

from c2cserve.bench.loadgen import Load, Outcome, generate
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.bench.prompts import Options, Prompts, Style
from c2cserve.runtime.replay import replay
from c2cserve.serving.catalog_shapes import find_models
from c2cserve.sim.planning.calibrate import (
    Calibration,
    Timed,
    Window,
    calibrate,
    observe,
    spread,
)
from c2cserve.sim.report import in_time, on_pace
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.world.costs import table_seconds
from c2cserve.sim.world.requests import SimRequest, TrackedRequest
from c2cserve.sim.world.tables import StepTable

SHORTER = 8
"""Lengths of the trace are divided by this."""
PROMPT_MAX, OUTPUT_MAX = 192, 64
BATCHES = (1, 2, 4, 8, 16)
_FEW_STEPS = 10
"""A kind of step with fewer is left out."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one segment, or of all."""

    requests: int
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    attainment: float
    """Share of requests with both targets met."""


class Client:
    """Sends requests to the server; keeps the record's clock."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._prompts = Prompts(0, Options(ignore_eos=True))

    def send(self, shapes: Sequence[Shape], concurrency: int | None) -> Outcome:
        """`concurrency` None: when they are due."""
        styles = {shape.model: Style(ids=True) for shape in shapes}
        load = Load(
            self._url, "/v1/completions", self._prompts.plan(shapes, styles),
            concurrency=concurrency, start_s=time.monotonic() + 0.2,
        )  # fmt: skip
        found = asyncio.run(generate(load, lambda ended: None))
        bad = [one.error for one in found.records if not one.ok and one.error != "http 429"]
        assert not bad, bad[:3]
        return found

    def alone(self, models: Sequence[str]) -> tuple[Window, list[float]]:
        """Prompts of many lengths one by one: when, and their times to first tokens."""
        lengths = [12, 16, 24, 32, 48, 64, 96, 128, PROMPT_MAX] * 3
        began_s = time.monotonic()
        shapes = [Shape(model, length, 1) for model in models for length in lengths]
        found = self.send(shapes, 1)
        ttft = [one.ttft_s for one in sorted(found.records, key=lambda one: one.index)]
        return (began_s, time.monotonic()), ttft

    def together(self, models: Sequence[str]) -> Window:
        """Decodes in batches of every size."""
        began_s = time.monotonic()
        for model in models:
            for batch in BATCHES:
                self.send([Shape(model, 40, 24)] * batch * 2, batch)
        return began_s, time.monotonic()

    def segment(self, asked: Sequence[SimRequest]) -> tuple[Window, list[Record]]:
        began_s = time.monotonic()
        shapes = [Shape(one.model, one.prompt, one.output, one.arrival_s) for one in asked]
        records = self.send(shapes, None).records
        return (began_s, time.monotonic()), records


def segment(catalog: Path, options: argparse.Namespace, number: int) -> list[SimRequest]:
    """The trace's next `seconds`, `speed` times as fast, with shorter lengths."""
    length_s = options.seconds * options.speed
    settings = WorkloadSettings(
        options.trace, start_s=number * length_s, duration_s=length_s, time_scale=options.speed,
        mapping="shuffle",
    )  # fmt: skip
    return [
        replace(
            one,
            prompt=min(max(4, one.prompt // SHORTER), PROMPT_MAX),
            output=min(max(2, one.output // SHORTER), OUTPUT_MAX),
        )
        for one in workload(settings, find_models(str(catalog)))
    ]


def figures(ttft: list[float], tpot: list[float], met: int, requests: int) -> Figures:
    ttft.sort()
    return Figures(
        requests, median(ttft), ttft[int(0.95 * len(ttft))], median(tpot), met / requests
    )


def live_figures(records: Sequence[Record]) -> Figures:
    met = sum(one.ok and one.ttft_s <= TTFT_S and (one.tpot_s or 0.0) <= TPOT_S for one in records)
    tpot = [one.tpot_s for one in records if one.tpot_s is not None]
    return figures([one.ttft_s for one in records if one.ok], tpot, met, len(records))


def simulate(
    hardware: Path, catalog: Path, segments: Sequence[Sequence[SimRequest]], noise: float
) -> list[TrackedRequest]:
    ended: list[TrackedRequest] = []
    for number, asked in enumerate(segments):
        scenario = Scenario(
            str(hardware), str(catalog), WorkloadSettings(""), seed=number, noise=noise
        )
        simulation = prepare(scenario, find_models(str(catalog)), asked)
        simulation.run()
        ended += simulation.requests.ended
    return ended


def simulated_figures(requests: Sequence[TrackedRequest]) -> Figures:
    met = sum(
        tracked.ending == "finished" and in_time(tracked) and on_pace(tracked)
        for tracked in requests
    )
    tpot = [tracked.tpot_s for tracked in requests if tracked.sampled > 1]
    return figures(
        [tracked.ttft_s for tracked in requests if tracked.sampled], tpot, met, len(requests)
    )


@dataclass
class Run:
    """What was measured live, by the record's clock."""

    alone: list[Window]
    alone_ttft_s: list[float]
    together: list[Window]
    segments: list[Window]
    records: list[Record]


def live(
    catalog: Path, folder: Path, options: argparse.Namespace, asked: Sequence[Sequence[SimRequest]]
) -> Run:
    run = Run([], [], [], [], [])
    names = [model.spec.id for model in find_models(str(catalog))]
    arguments = ["--slices", "1", "--threads", "1", "--record", str(folder / "record.jsonl")]
    with Server(catalog, folder / "server.log", arguments) as server:
        server.wait_ready(60.0, print)
        client = Client(server.url)
        client.send([Shape(name, 64, 16) for name in names] * 4, 4)  # to be warm
        for requests in asked:
            window, ttft = client.alone(names)
            run.alone.append(window)
            run.alone_ttft_s += ttft
            run.together.append(client.together(names))
            window, records = client.segment(requests)
            run.segments.append(window)
            run.records += records
        window, ttft = client.alone(names)
        run.alone.append(window)
        run.alone_ttft_s += ttft
        run.together.append(client.together(names))
    return run


def profile(record: Path, run: Run) -> Calibration:
    """Of the calibration loads alone."""
    found = calibrate(record, [*run.alone, *run.together])
    spans_s = observe(record, run.alone).spans_s.values()
    beside = [a - b for a, b in zip(run.alone_ttft_s, spans_s, strict=True)]
    return replace(found, request_s=median(beside))


def phases(steps: Sequence[Timed], tables: Mapping[str, StepTable]) -> dict[str, Any]:
    """Return by kind of step what steps took, and what the profile says of them: medians, and how
    many there were."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for one in steps:
        decodes, parts = len(one.decodes()), len(one.step.seqs)
        if not decodes:
            kind = "prompts"
        elif decodes < parts:
            kind = "prompts and decodes"
        else:
            kind = f"decodes, up to {1 << (decodes - 1).bit_length()}"
        said_s, _ = table_seconds(one.step, tables[one.step.model], 0)
        kinds.setdefault(kind, []).append((one.took_s, said_s))
    return {
        kind: {
            "steps": len(pairs), "measured_s": median(took_s for took_s, _ in pairs),
            "simulated_s": median(said_s for _, said_s in pairs),
            "ratio": median(said_s / took_s for took_s, said_s in pairs),
        }
        for kind, pairs in sorted(kinds.items())
        if len(pairs) >= _FEW_STEPS
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="slinfer32")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--speed", type=float, default=1.5, help="Of the trace.")
    parser.add_argument("--copies", type=int, default=2, help="Models of each size.")
    parser.add_argument("--keep", type=Path, help="Leave record and profile here.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        catalog = make_catalog(folder, options.copies)
        asked = [segment(catalog, options, number) for number in range(options.rounds)]
        run = live(catalog, folder, options, asked)
        record = folder / "record.jsonl"
        found = profile(record, run)
        hardware = found.write(folder / "profile")
        requests = simulate(hardware, catalog, asked, found.noise)
        steps = observe(record, run.segments).steps
        drift, _ = spread(steps, found.tables)
        same = replay(record).equal
    ours, real = simulated_figures(requests), live_figures(run.records)
    results: dict[str, Any] = {
        "live": asdict(real),
        "simulated": asdict(ours),
        "ttft_p50_ratio": ours.ttft_p50_s / real.ttft_p50_s,
        "tpot_p50_ratio": ours.tpot_p50_s / real.tpot_p50_s,
        "attainment_points": 100 * (ours.attainment - real.attainment),
        "step_drift": drift,
        "phases": phases(steps, found.tables),
        "noise": found.noise,
        "request_s": found.request_s,
        "record_replays_equal": same,
    }
    report(
        results, options.out, trace=options.trace, rounds=options.rounds, seconds=options.seconds,
        speed=options.speed, copies=options.copies,
    )  # fmt: skip


if __name__ == "__main__":
    main()
