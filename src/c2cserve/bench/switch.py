"""The cost of changing the model, measured with sequential one-token requests.

Requests go to one model after itself (AAAA) and after another (ABAB), in alternating blocks. Slow
drift of the server affects both alike."""

import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from c2cserve.bench.client import Unanswered, ask
from c2cserve.bench.loadgen_http import Client
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.phases import Phases, phase_table, read_phases
from c2cserve.bench.plan import Shape
from c2cserve.bench.prompts import Endpoint, Options, PromptKind, Prompts, Style, find_style
from c2cserve.bench.report import Spread, percentile, spread
from c2cserve.bench.serve import resolve_models, write_results
from c2cserve.terminal.output import (
    CliError,
    check_writable,
    console,
    progress_console,
    show_seconds,
)

_BLOCKS = 10
_RESAMPLES = 400
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    url: str
    models: tuple[str, ...]
    pairs: int
    """Measured requests of each kind, at least."""
    input_len: int
    seed: int


@dataclass(frozen=True, slots=True)
class Probe:
    model: str
    switched: bool
    measured: bool
    """False for the request that brings the server into the state a phase starts from."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """TTFT, seconds. The overhead compares each model with itself, then averages, so that models
    of different speed do not blur it."""

    same: Spread
    switched: Spread
    overhead_p50_s: float
    overhead_p50_low_s: float
    overhead_p50_high_s: float
    """Bounds of a 95 % bootstrap interval."""
    requests: int
    slice_switches: int | None
    """Switches that slices counted during the run; None when the server does not tell."""
    expected_switches: int


def run_switch(
    options: SwitchOptions, key: str | None, admin_key: str | None, out: Path | None
) -> None:
    """Measure switches. Raises `CliError` if a request fails, or if there are not two models."""
    check_writable(out)
    models = resolve_models(options.url, options.models, key)
    if len(set(models)) < 2:
        raise CliError("switching needs at least two different --models A,B", 2)
    sequence = list(plan_sequence(models, options.pairs))
    before = read_phases(options.url, admin_key)
    switches_before = _slice_switches(options.url, admin_key)
    records = asyncio.run(_ask_all(options, key, sequence))
    switches_after = _slice_switches(options.url, admin_key)
    counted = None
    if switches_before is not None and switches_after is not None:
        counted = switches_after - switches_before
    comparison = compare(sequence, records, counted, options.seed)
    phases = read_phases(options.url, admin_key).since(before)
    _show(models, comparison, phases)
    if out is not None:
        results = {**asdict(comparison), "phases": asdict(phases)}
        write_results(out, "switch", asdict(options), {"models": models, **results})


def plan_sequence(models: Sequence[str], pairs: int) -> Iterator[Probe]:
    """Yield the requests. Every block has as many of each model in either kind, and the kinds
    alternate in going first."""
    rounds = math.ceil(pairs / (_BLOCKS * len(models)))
    for block in range(_BLOCKS):
        for switched in (False, True) if block % 2 == 0 else (True, False):
            if switched:
                yield Probe(models[-1], switched=True, measured=False)
                for _ in range(rounds):
                    yield from (Probe(model, switched=True, measured=True) for model in models)
            else:
                for model in models:
                    yield Probe(model, switched=False, measured=False)
                    yield from [Probe(model, switched=False, measured=True)] * rounds


async def _ask_all(
    options: SwitchOptions, key: str | None, sequence: Sequence[Probe]
) -> list[Record]:
    from rich.progress import track

    start_s = time.monotonic()
    client = Client(options.url, key, start_s, _TIMEOUT_S)
    endpoint = Endpoint.COMPLETIONS
    prompts = Prompts(options.seed, Options(endpoint))
    styles: dict[str, Style] = {}
    for model in {probe.model for probe in sequence}:
        styles[model] = await find_style(client, model, PromptKind.AUTO, prompts, endpoint)
    records: list[Record] = []
    screen = progress_console()
    for index, probe in enumerate(track(sequence, "asking", console=screen, transient=True)):
        body = prompts.body(Shape(probe.model, options.input_len, 1), styles[probe.model])
        record = Record(index=index, model=probe.model, due_s=time.monotonic() - start_s)
        await client.post(endpoint.path, body, record)
        if not record.ok:
            raise CliError(f"{probe.model}: {record.error}: {record.error_detail}")
        records.append(record)
    await client.close()
    return records


def compare(
    sequence: Sequence[Probe], records: Sequence[Record], counted: int | None, seed: int
) -> Comparison:
    same: dict[str, list[float]] = {}
    switched: dict[str, list[float]] = {}
    for probe, record in zip(sequence, records, strict=True):
        if probe.measured:
            kind = switched if probe.switched else same
            kind.setdefault(probe.model, []).append(record.ttft_s)
    rng = random.Random(seed)
    resampled = sorted(
        _overhead(_resample(same, rng), _resample(switched, rng)) for _ in range(_RESAMPLES)
    )
    models = [probe.model for probe in sequence]
    changes = sum(now != before for before, now in pairwise(models))
    return Comparison(
        same=_pooled(same),
        switched=_pooled(switched),
        overhead_p50_s=_overhead(same, switched),
        overhead_p50_low_s=percentile(resampled, 0.025),
        overhead_p50_high_s=percentile(resampled, 0.975),
        requests=len(records),
        slice_switches=counted,
        expected_switches=changes,
    )


def _overhead(same: Mapping[str, list[float]], switched: Mapping[str, list[float]]) -> float:
    return fmean(
        percentile(sorted(switched[model]), 0.5) - percentile(sorted(values), 0.5)
        for model, values in same.items()
    )


def _resample(values: Mapping[str, list[float]], rng: random.Random) -> dict[str, list[float]]:
    return {model: rng.choices(own, k=len(own)) for model, own in values.items()}


def _pooled(values: Mapping[str, list[float]]) -> Spread:
    pooled = spread(value for own in values.values() for value in own)
    assert pooled is not None
    return pooled


def _slice_switches(url: str, key: str | None) -> int | None:
    """Return the switches of all slices so far, or None if there is no admin API to ask."""
    try:
        slices = json.loads(ask(url, "/admin/state", key=key))["slices"]
        return sum(int(one["switches"]) for one in slices)
    except (Unanswered, ValueError, KeyError, TypeError):
        return None


def _show(models: Sequence[str], found: Comparison, phases: Phases) -> None:
    from rich.table import Table

    table = Table(title=f"TTFT of {found.requests} one-token requests to {', '.join(models)}")
    table.add_column("")
    for head in ("p50", "p90", "p99", "mean"):
        table.add_column(head, justify="right")
    for name, one in (("same model", found.same), ("switched", found.switched)):
        cells = (one.p50, one.p90, one.p99, one.mean)
        table.add_row(name, *(show_seconds(value) for value in cells))
    screen = console()
    screen.print(table)
    screen.print(
        f"a switch adds {found.overhead_p50_s * 1e3:+.3f} ms (p50; 95 % between"
        f" {found.overhead_p50_low_s * 1e3:+.3f} and {found.overhead_p50_high_s * 1e3:+.3f})"
    )
    by_server = phase_table([("", phases)])
    if by_server is not None:
        screen.print(by_server)
    if found.slice_switches is not None and found.slice_switches < found.expected_switches / 2:
        sys.stderr.write(
            f"warning: slices switched {found.slice_switches} times for"
            f" {found.expected_switches} changes of model: the models lay on different slices;"
            " name more models than there are slices, or serve with --slices 1\n"
        )
