"""One run of `weights_mix.py`: the cells that the machine can do, live and then simulated."""

import argparse
import json
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from catalogue_files import Pick
from catalogue_server import ServerFailed
from gpu_models import weight_bytes
from mix_checkpoints import POOL_SLACK, Checkpoints
from mix_live import LiveArena
from mix_load import (
    SLO,
    Answer,
    Arena,
    Cell,
    figures,
    paired,
    parse_cells,
    requests,
    warm_up,
)
from mix_machine import (
    IMAGINED,
    Host,
    Refused,
    earlier_machine,
    imagined_machine,
    this_machine,
)
from mix_simulated import simulate, simulated_models
from mix_times import Times, host_times, read_times
from report import report

from c2cserve.core.machine import Slice
from c2cserve.engine.gpu.requirements import usable_gpus

_RESERVE = 6 << 30
"""Host memory of processes."""
_BETWEEN_S = 10.0
"""Before and after the requests of a seed, about."""
_ROOMY = 4
"""An arena so many times the largest model keeps a model's weights beside its KV for certain."""


class Run:
    """One run over all cells; `results` are complete up to where it came."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self._given, self._scratch = given, scratch
        self._began_s = time.monotonic()
        self._made: Pick = given.mix.pick()
        self._models = simulated_models(self._made)
        self._names = [entry.id for entry in self._made.entries]
        self._times: Times | None = None
        self._link_bytes_per_s = 0.0
        """Of the host's link; 0: a CPU, which loads nothing."""
        self.results: dict[str, Any] = {"rows": [], "refused": {}, "not_run": [], "failed": {}}

    def all(self) -> None:
        """Run every cell that the machine can do; where a server fails, the next one is tried.

        Raises Refused if the machine can do none, ValueError, OSError."""
        given = self._given
        host = self._host()
        self._times = self._earlier_times()
        slices = self._plan(host)
        sizes = {shape: weight_bytes(shape, n) for shape, n in self._made.shapes.items()}
        self.results |= {
            "host": host.described(), "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
            "catalogue": {"models": self._names, "bytes": self._made.bytes, "weight_bytes": sizes},
        }  # fmt: skip
        arenas = sorted(slices, key=lambda arena: -(slices[arena].kv_bytes))
        if not given.simulate_only:
            catalog = self._catalogue()
            for arena in arenas:
                try:
                    self._live(host, catalog, arena, slices[arena])
                except (ServerFailed, ValueError) as error:
                    self.results["failed"][arena.text] = f"{type(error).__name__}: {error}"
                    self._tell(f"arena {arena.text} failed: {error}")
        if not given.live_only:
            for arena in arenas:
                self._simulated(host, arena, slices[arena])

    def again(self, earlier: dict[str, Any]) -> None:
        """Simulate the cells of an earlier result, with its speeds, step times and requests."""
        given, before = self._given, earlier["parameters"]
        for name in ("seeds", "requests", "answer_s", "host_kv_bytes"):
            setattr(given, name, before[name])
        self.results = earlier["results"]
        self._times = self._earlier_times() or read_times(self.results)
        host = earlier_machine(self.results["host"])
        rows = {row["cell"]: row for row in self.results["rows"]}
        given.cells = [
            Cell(replace(cell.arena, bytes=rows[cell.text]["arena_bytes"]), cell.rate)
            for cell in parse_cells(",".join(rows))
        ]
        for arena, slice_ in self._plan(host).items():
            self._simulated(host, arena, slice_)

    def _earlier_times(self) -> Times | None:
        """Return the step times that were asked for, if any. Raises OSError, ValueError."""
        times = self._given.times
        return None if times is None else read_times(json.loads(times.read_text())["results"])

    def keep(self) -> None:
        """Write what there is."""
        self.results["seconds"] = time.monotonic() - self._began_s
        self.results["times"] = None if self._times is None else self._times.as_json()
        given = self._given
        report(
            self.results, given.out, show=False, cells=[cell.text for cell in given.cells],
            seeds=given.seeds, requests=given.requests, answer_s=given.answer_s, tiny=given.tiny,
            host_kv_bytes=given.host_kv_bytes, serve=given.serve,
        )  # fmt: skip

    def _tell(self, said: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {said}", flush=True)

    # ---- what the machine can do ----------------------------------------------------------------

    def _host(self) -> Host:
        given = self._given
        here = not given.simulate_only or (given.gpu is None and bool(usable_gpus()))
        if here or given.tiny:
            return this_machine(given.profile, tiny=given.tiny)
        return imagined_machine(given.gpu or next(iter(IMAGINED)), given.profile)

    def _plan(self, host: Host) -> dict[Arena, Slice]:
        """Return the slice of each arena. One that the machine cannot do is refused with a line;
        if all are, raises Refused with the last."""
        self._link_bytes_per_s = host.speeds.h2d_bytes_per_s if host.gpus else 0.0
        slices: dict[Arena, Slice] = {}
        why = ""
        for arena in dict.fromkeys(cell.arena for cell in self._given.cells):
            try:
                slices[arena] = host.plan(arena, self._given.host_kv_bytes)
            except Refused as error:
                why = f"{arena.text}: {error}"
                self.results["refused"][arena.text] = str(error)
                self._tell(f"refused: {why}")
        if not slices or (self.results["refused"] and not self._given.all_cells):
            raise Refused(why)
        return slices

    def _catalogue(self) -> Path:
        """Return the catalogue's file. Raises Refused."""
        given = self._given
        checkpoints = Checkpoints(
            (given.work or self._scratch) / ("tiny" if given.tiny else "mix"), given.pool_dir,
            self._made, given.host_kv_bytes + (0 if given.tiny else _RESERVE),
        )  # fmt: skip
        checkpoints.check_room(given.memory_gib)
        catalog = checkpoints.written()
        self._tell("checkpoints are there")
        return catalog

    # ---- the two worlds -------------------------------------------------------------------------

    def _live(self, host: Host, catalog: Path, arena: Arena, slice_: Slice) -> None:
        """Run the cells of an arena on a server, as far as there is time."""
        given = self._given
        cells = [cell for cell in self._cells(arena) if self._time_left(cell)]
        if not cells:
            return
        self._tell(f"arena {arena.text}: a server starts")
        arguments = [
            "--pool-dir", str(self._scratch), "--pool-bytes", str(self._made.bytes + POOL_SLACK),
            *host.serve_arguments(arena, given.host_kv_bytes), *shlex.split(given.serve),
        ]  # fmt: skip
        log = self._scratch / "server.log"
        try:
            with LiveArena(catalog, log, arguments, given.mix, self._made, self._tell) as server:
                size = server.wait_ready(given.ready_s)
                self._tell(f"it is up, {size / 1e9:.2f} GB of arena")
                self._measure(server, size, on_gpu=slice_.gpu is not None)
                for cell in cells:
                    if self._time_left(cell):
                        self._live_cell(server, cell, size)
        finally:
            if given.out is not None and log.exists():
                given.out.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, given.out.with_suffix(f".{arena.text}.log"))

    def _measure(self, server: LiveArena, size: int, *, on_gpu: bool) -> None:
        """Measure step times, once, where weights are certain to be in memory."""
        largest = max(model.spec.weight_bytes for model in self._models)
        if self._times is not None:
            return
        if on_gpu and size < _ROOMY * largest:
            self._tell("step times are worked out: the arena is too small to measure them")
            return
        self._times = server.times(f"measured on this machine, arena of {size / 1e9:.2f} GB")
        self._tell(f"step times are measured; {1e3 * self._times.request_s:.1f} ms a request")

    def _live_cell(self, server: LiveArena, cell: Cell, size: int) -> None:
        answers: list[Answer] = []
        counters: dict[str, float] = {}
        for seed, count in self._counts():
            asked = requests(self._given.mix, self._names, cell.rate, count, seed)
            self._tell(f"{cell.text}, seed {seed}: {count} requests in {asked[-1].due_s:.0f} s")
            found, risen = server.run(asked, self._given.answer_s)
            answers += found
            counters = {name: value + counters.get(name, 0.0) for name, value in risen.items()}
        self._row(cell, size)["live"] = figures(answers, self._load_s(cell)) | {
            "counters": counters
        }
        self._said(cell, "live")
        self._tell(f"{cell.text} live: {weights_line(counters)}")
        self._tell(f"{cell.text} live: {steps_line(counters)}")

    def _simulated(self, host: Host, arena: Arena, slice_: Slice) -> None:
        given = self._given
        warm = warm_up(given.mix, self._names)
        for cell in self._cells(arena):
            if cell.text in self.results["not_run"]:
                continue
            answers: list[Answer] = []
            fetches, times = 0, self._times_for(cell)
            for seed, count in self._counts():
                asked = requests(given.mix, self._names, cell.rate, count, seed)
                found = simulate(
                    host, slice_, arena, self._models, times, asked, warm, seed,
                    given.answer_s,
                )  # fmt: skip
                answers += found.answers
                fetches += found.fetches
            row = self._row(cell, slice_.kv_bytes)
            row["simulated"] = figures(answers, self._load_s(cell)) | {"fetches": fetches}
            if live := row.get("live"):
                row["paired"] = paired(live, row["simulated"])
            self._said(cell, "simulated")

    def _times_for(self, cell: Cell) -> Times | None:
        """Return the step times to simulate a cell by. Where none were measured of the host's
        thread, or `--counted` is given, they are those that the server counted in the cell
        itself."""
        times = self._times
        if times is None or (times.host is not None and not self._given.counted):
            return None if times is None else times.bounded()
        lives = (row.get("live") for row in self.results["rows"] if row["cell"] == cell.text)
        live = next(lives, None)
        return times if live is None else replace(times, host=host_times(live["counters"]))

    def _load_s(self, cell: Cell) -> float:
        """Return the time of the smallest model's load from the host, infinite if none loads over
        its link alone."""
        if not self._link_bytes_per_s or cell.arena.lent_bytes:
            return inf
        return min(one.spec.weight_bytes for one in self._models) / self._link_bytes_per_s

    def _cells(self, arena: Arena) -> list[Cell]:
        return [cell for cell in self._given.cells if cell.arena == arena]

    def _counts(self) -> list[tuple[int, int]]:
        """Return seeds, and how many requests each of them has."""
        seeds, total = self._given.seeds, self._given.requests
        return [(seed, (total + i) // len(seeds)) for i, seed in enumerate(seeds)]

    def _time_left(self, cell: Cell) -> bool:
        """Whether a cell whose requests are all answered soon would end in time."""
        counts = self._counts()
        spent_s = time.monotonic() - self._began_s
        needed_s = sum(count for _, count in counts) / cell.rate + _BETWEEN_S * len(counts)
        if spent_s + needed_s < self._given.budget_s:
            return True
        self.results["not_run"].append(cell.text)
        self._tell(f"{cell.text}: no time for it")
        return False

    def _row(self, cell: Cell, arena_bytes: int) -> dict[str, Any]:
        for row in self.results["rows"]:
            if row["cell"] == cell.text:
                return row
        self.results["rows"].append(
            {"cell": cell.text, "arena_bytes": arena_bytes, "lent_bytes": cell.arena.lent_bytes,
             "rate": cell.rate}
        )  # fmt: skip
        return self.results["rows"][-1]

    def _said(self, cell: Cell, world: str) -> None:
        found = self._row(cell, 0)[world]
        self._tell(f"{cell.text} {world}: {line_of(found)}")
        self.keep()


def line_of(found: dict[str, Any]) -> str:
    """Return the figures of one world in a cell as a line."""
    return (
        f"{found['in_time']:.1%} in time, TTFT {_ms(found['ttft_p50_s'])}, TPOT"
        f" {_ms(found['tpot_p50_s'])}, {found['refused']} refused,"
        f" {found['unanswered']} unanswered, {found['failed']} failed of {found['requests']}"
    )


def weights_line(counters: Mapping[str, float]) -> str:
    """Return what a server's counters say of weights, as a line."""

    def count(name: str) -> float:
        return counters.get(f"{name}_total", 0.0)

    took_s, size = count("weight_fetch_seconds"), count("weight_fetched_bytes")
    return (
        f"{count('weight_fetches'):.0f} loads of {size / 1e9:.1f} GB in {took_s:.1f} s,"
        f" {count('weight_fetches_cancelled'):.0f} cancelled,"
        f" {count('weight_fetches_refused'):.0f} refused,"
        f" {count('weight_releases'):.0f} released;"
        f" steps read {count('weights_hit_bytes') / 1e9:.1f} GB in HBM,"
        f" {count('weights_streamed_bytes') / 1e9:.1f} GB streamed"
        f" ({count('weights_peer_bytes') / 1e9:.1f} GB of them lent)"
    )


def steps_line(counters: Mapping[str, float]) -> str:
    """Return where a slice's time went by a server's counters, as a line. p, d, s: steps with
    prompts, decode steps of the model of the step before, and those after a switch."""

    if "in_flight_seconds_total" not in counters:
        return "not counted: an earlier server"

    def count(name: str) -> float:
        return counters.get(f"{name}_total", 0.0)

    def seconds(name: str) -> str:
        return f"{count(f'{name}_seconds'):.2f}"

    def by_kind(name: str) -> str:
        return "/".join(seconds(f"{kind}_{name}") for kind in ("prefill", "decode", "switched"))

    prefills, switched = count("prefill_steps"), count("switched_steps")
    decodes = max(0.0, count("steps") - prefills - switched)
    return (
        f"p/d/s {prefills:.0f}/{decodes:.0f}/{switched:.0f} steps: computing {by_kind('compute')} s"
        f" of {seconds('in_flight')} in flight; without a step {seconds('bubble')}"
        f" ({seconds('loading_bubble')} beside loads), contended {seconds('contended')};"
        f" host: batch {by_kind('batch')}, launch {by_kind('launch')},"
        f" completion {by_kind('completion')}, wait {seconds('step_wait')};"
        f" policy {seconds('policy')}, submit {seconds('submit')}, actions {seconds('action')},"
        f" polls {seconds('poll')}, asleep {seconds('sleep')}"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"
