"""Overload: answers within their SLO per second when more is asked than a server can do.

python benchmarks/overload.py [--catalog examples/specialists/catalog.toml] [--seconds 15]
    [--loads 0.5,1,2,4,10] [--serve "--slices 2"] [--setting "" --setting "--patience 20"]
    [--prompt 32] [--output 32] [--capacity REQUESTS_PER_S] [--rounds 1] [--out FILE]
    [--shape llama-8b --models 4 --work DIR] [--cpus 8-15]

`c2cserve serve` is started once for each --setting (options of `serve`, one string; the default is
the server as it comes). Closed loops of 16 to 128 users find what it can do: the *capacity* is the
most answers per second within their SLO. Then open loops offer multiples of the capacity with
Poisson arrivals and never wait for answers. All models of the catalogue are asked, evenly; prompts
are texts of words, so tokenizing is part of the work. With --rounds the loads take turns, each
round in another order, and a row is the medians of its rounds: a machine that others share changes
its speed by more from one load to the next than loads differ.

An answer counts if its first token came within the TTFT target after the request was due, and its
mean time per further token is within the TPOT target. Of each load: answers within SLO, late ones
and refusals per second, how long a refusal took, and the processor time of the server's processes
by their kind, in cores (`server` is the event loop and the controller). `refused_by` says which
limit refused. `lag` says how late the generator sent; `ttft_server` counts late first tokens that
were late without that. The generator shares the server's processors unless --cpus gives it its
own (give the server others, by `taskset`). With --shape, random models of the shape are served.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from catalogue_files import pick, write_catalogue
from catalogue_server import Server, exit_on_sigterm
from gpu_models import SHAPES
from late_answers import ServerLog, late_first_tokens
from process_memory import kind_of
from report import report

from c2cserve.bench import plan as bench_plan
from c2cserve.bench.loadgen import Load, Outcome, Planned
from c2cserve.bench.loadgen_http import Client
from c2cserve.bench.loadgen_processes import generate_with
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.prompts import Endpoint, Options, Prompts, Style
from c2cserve.bench.report import SloTargets, percentile

ROOT = Path(__file__).parent.parent
_USERS = (16, 32, 64, 128)
_WARM_S = 3.0
_PAUSE_S = 1.0
"""Between loads: what the last one left running ends."""
_READY_S = 180.0
_TIMEOUT_S = 60.0
_PROBE_WORDS = 16
_BODIES = 2048
"""Different requests in a closed loop."""
_LIMITS = ("early", "overload", "patience", "queue_full")

Row = dict[str, Any]


def main() -> None:
    given = _arguments()
    exit_on_sigterm()
    results: Row = {"capacity_per_s": given.capacity, "closed_loops": [], "settings": {}}
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        if given.shape:
            made = pick(given.models, 1 << 60, 1, ((given.shape, 1),))
            given.catalog = write_catalogue(Path(folder), made, ttft_s=1.0, tpot_s=0.1)
        given.models, given.slo = _catalogue(given.catalog)
        for setting in given.setting:
            print(f"serve {given.serve} {setting}".rstrip(), flush=True)
            results["settings"][setting] = _measure(given, setting, results)
    best = max(row["met_per_s"] for rows in results["settings"].values() for row in rows)
    results["best_met_per_s"] = best
    for rows in results["settings"].values():
        for row in rows:
            row["of_best"] = round(row["met_per_s"] / best, 3) if best else 0.0
    _show(results)
    report(
        results, given.out, show=False, serve=given.serve,
        catalog=f"{len(given.models)} x {given.shape}" if given.shape else
        os.path.relpath(given.catalog, ROOT), generator_cpus=given.cpus,
        seconds=given.seconds, rounds=given.rounds, prompt=given.prompt, output=given.output,
        ttft_s=given.slo.ttft_s, tpot_s=given.slo.tpot_s,
    )  # fmt: skip


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    catalog = ROOT / "examples" / "specialists" / "catalog.toml"
    parser.add_argument("--catalog", type=Path, default=catalog)
    parser.add_argument("--shape", choices=SHAPES, help="of random models, without --catalog")
    parser.add_argument("--models", type=int, default=4, help="of the shape")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="for models and pool")
    parser.add_argument("--cpus", help="processors of the generator, as 8-15; default: all")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--loads", default="0.5,1,2,4,10", help="multiples of the capacity")
    parser.add_argument("--serve", default="--slices 2", help="options of `serve`, one string")
    parser.add_argument("--setting", action="append", help="further options to compare")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    parser.add_argument("--capacity", type=float, help="requests per second; default: measured")
    parser.add_argument("--processes", type=int, default=1, help="that send")
    parser.add_argument("--rounds", type=int, default=1, help="of all loads, in turns")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    given.loads = [float(load) for load in given.loads.split(",")]
    given.setting = given.setting or [""]
    return given


def _catalogue(path: Path) -> tuple[list[str], SloTargets]:
    """Its models, and the targets that all of them have."""
    read = tomllib.loads(path.read_text())
    defaults = read.get("defaults", {})
    slo = SloTargets(defaults.get("ttft_s", 1.0), defaults.get("tpot_s", 0.1))
    return [model["id"] for model in read["models"]], slo


def _measure(given: argparse.Namespace, setting: str, results: Row) -> list[Row]:
    """A row for each load, of a server of its own."""
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        arguments = ["--pool-dir", work, *shlex.split(given.serve), *shlex.split(setting)]
        with ExitStack() as stack, Server(given.catalog, Path(work) / "log", arguments) as server:
            server.wait_ready(_READY_S)
            stack.enter_context(_on_processors(given.cpus))
            bench = _Bench(given, server, ServerLog(Path(work) / "log"))
            bench.warm()
            if results["capacity_per_s"] is None:
                results["closed_loops"] = [bench.closed(users) for users in _USERS]
                best = max(row["met_per_s"] for row in results["closed_loops"])
                results["capacity_per_s"] = best
            return _in_turns(bench, given.loads, given.rounds, results["capacity_per_s"])


def _in_turns(bench: "_Bench", loads: list[float], rounds: int, capacity_per_s: float) -> list[Row]:
    """Return a row for each load, in their order."""
    rows: dict[float, list[Row]] = {load: [] for load in loads}
    for at in range(rounds):
        first = at % len(loads)
        for load in loads[first:] + loads[:first]:
            rows[load].append(bench.offer(load, capacity_per_s, at))
    return [
        _medians(rows[load]) | {"met_rounds": [row["met_per_s"] for row in rows[load]]}
        for load in loads
    ]


def _medians(rows: Sequence[Row]) -> Row:
    """Return the median of each number. A number that some rounds lack (no request was late) is the
    median of the others."""
    found: Row = {}
    for name in {name: None for row in rows for name in row}:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values and isinstance(values[0], dict):
            found[name] = _medians(values)
        else:
            found[name] = round(statistics.median(values), 3) if values else None
    return found


@contextmanager
def _on_processors(cpus: str | None) -> Generator[None]:
    """Run this process, and those that it starts, on these processors only."""
    before = os.sched_getaffinity(0)
    if cpus:
        first, _, last = cpus.partition("-")
        os.sched_setaffinity(0, range(int(first), int(last or first) + 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Bench:
    """Loads on one server."""

    def __init__(self, given: argparse.Namespace, server: Server, log: ServerLog) -> None:
        self._given = given
        self._server = server
        self._log = log
        self._prompts = Prompts(0, Options(ignore_eos=True))
        self._styles = asyncio.run(self._find_styles())

    async def _find_styles(self) -> dict[str, Style]:
        client = Client(self._server.url, None, time.monotonic(), _TIMEOUT_S)
        try:
            return {model: await _text_style(client, model) for model in self._given.models}
        finally:
            await client.close()

    def warm(self) -> None:
        self._loop(8, _WARM_S)

    def closed(self, users: int) -> Row:
        row = {"users": users, **self._row(self._loop(users, self._given.seconds))}
        print(json.dumps(row), flush=True)
        return row

    def offer(self, load: float, capacity_per_s: float, seed: int) -> Row:
        rate = load * capacity_per_s
        pairs = bench_plan.sampled_lengths(
            lambda _: self._given.prompt, lambda _: self._given.output
        )
        models: list[str] = self._given.models
        rng = random.Random(load + seed)
        shapes = bench_plan.poisson(
            models, [1.0] * len(models), rate, None, self._given.seconds, pairs, rng
        )
        planned = self._prompts.plan(shapes, self._styles)
        time.sleep(_PAUSE_S)
        refused = self._refused()
        before = _cpu_s(self._server.pids)
        outcome = self._send(Load(self._server.url, "", planned, timeout_s=_TIMEOUT_S))
        used = _cpu_s(self._server.pids)
        row = {"load": load, "offered_per_s": round(rate, 1), **self._row(outcome)}
        cores = {
            kind: round((one - before.get(kind, 0.0)) / self._given.seconds, 3)
            for kind, one in sorted(used.items())
        }
        row |= {"server_cpu": round(sum(cores.values()), 2), "server_cpu_by_kind": cores}
        by_limit = self._refused() - refused
        row["refused_by"] = {
            name: round(count / self._given.seconds, 1) for name, count in sorted(by_limit.items())
        }
        print(json.dumps(row), flush=True)
        return row

    def _refused(self) -> Counter[str]:
        """Return how many requests each limit has refused so far. `early`: where they are read, at
        the least cost. The others were tokenized before."""
        found = self._server.metrics()
        return Counter({name: int(found[f"c2cserve:refused_{name}_total"]) for name in _LIMITS})

    def _loop(self, users: int, seconds: float) -> Outcome:
        pairs = bench_plan.sampled_lengths(
            lambda _: self._given.prompt, lambda _: self._given.output
        )
        models: list[str] = self._given.models
        rng = random.Random(users)
        shapes = bench_plan.closed_loop(models, [1.0] * len(models), _BODIES, pairs, rng)
        planned: list[Planned] = self._prompts.plan(shapes, self._styles)
        return self._send(
            Load(
                self._server.url, "", planned, concurrency=users, duration_s=seconds,
                timeout_s=_TIMEOUT_S,
            )
        )  # fmt: skip

    def _send(self, load: Load) -> Outcome:
        load.path = Endpoint.COMPLETIONS.path
        return asyncio.run(generate_with(load, self._given.processes, lambda _: None))

    def _row(self, outcome: Outcome) -> Row:
        """Rates are over the time in which requests were due."""
        records, slo, seconds = outcome.records, self._given.slo, self._given.seconds
        met = sum(slo.met(record) for record in records)
        refused = [record for record in records if record.error == "http 429"]
        answered = sum(record.ok for record in records)
        failed = len(records) - answered - len(refused)
        parts_ms = self._log.parts_ms()
        return {
            "met_per_s": round(met / seconds, 1),
            "late_per_s": round((answered - met) / seconds, 1),
            "refused_per_s": round(len(refused) / seconds, 1),
            "failed": failed,
            "ttft_p50_ms": _ms([r.ttft_s for r in records if r.ok], 0.5),
            "ttft_p99_ms": _ms([r.ttft_s for r in records if r.ok], 0.99),
            "tpot_p99_ms": _ms([r.tpot_s or 0.0 for r in records if r.ok], 0.99),
            "refusal_p50_ms": _ms([r.e2e_s for r in refused], 0.5),
            "refusal_p99_ms": _ms([r.e2e_s for r in refused], 0.99),
            "late": late_first_tokens(records, slo, parts_ms),
            "generator_cpu": round(outcome.cpu_s / seconds, 2),
            "lag_p99_ms": _ms([r.sent_s - r.due_s for r in records if r.sent_s >= 0], 0.99),
        }


async def _text_style(client: Client, model: str) -> Style:
    """How many tokens a word of a prompt is there: texts, because ids would spare the server its
    tokenizers."""
    prompts, plain, record = Prompts(1, Options()), Style(ids=False), Record(0, model, 0.0)
    body = prompts.body(bench_plan.Shape(model, _PROBE_WORDS, 1), plain)
    await client.post(Endpoint.COMPLETIONS.path, body, record)
    if not record.ok:
        raise SystemExit(f"{model}: {record.error}: {record.error_detail}")
    return Style(ids=False, tokens_per_word=record.prompt_tokens / _PROBE_WORDS)


def _ms(values: Sequence[float], share: float) -> float | None:
    return round(1e3 * percentile(sorted(values), share), 1) if values else None


def _cpu_s(pids: Sequence[int]) -> dict[str, float]:
    """Return the processor time that the processes have used so far, by kind. `pids`: the server's
    first."""
    used: dict[str, float] = defaultdict(float)
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        ticks = int(fields[11]) + int(fields[12])
        used[kind_of(pid, pids[0], {})] += ticks / os.sysconf("SC_CLK_TCK")
    return used


def _show(results: Row) -> None:
    heads = (
        "load", "offered_per_s", "met_per_s", "of_best", "late_per_s", "refused_per_s", "failed",
        "ttft_p99_ms", "tpot_p99_ms", "refusal_p50_ms", "refusal_p99_ms", "server_cpu",
    )  # fmt: skip
    print(f"capacity {results['capacity_per_s']}/s; best {results['best_met_per_s']}/s")
    for setting, rows in results["settings"].items():
        print(f"\n{setting or 'default'}")
        print("  ".join(heads))
        for row in rows:
            cells = ("-" if row[head] is None else f"{row[head]:g}" for head in heads)
            print("  ".join(cell.rjust(len(head)) for cell, head in zip(cells, heads, strict=True)))


if __name__ == "__main__":
    main()
