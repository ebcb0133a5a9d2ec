"""One measurement of a server: plan, probe, send, report."""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from c2cserve import __version__
from c2cserve.bench import plan as bench_plan
from c2cserve.bench.client import ask
from c2cserve.bench.loadgen import Load, Outcome
from c2cserve.bench.loadgen_http import Client
from c2cserve.bench.loadgen_processes import generate_with
from c2cserve.bench.phases import Phases, phase_table, read_phases
from c2cserve.bench.plan import Caps, Pairs, Shape
from c2cserve.bench.prompts import Endpoint, Options, PromptKind, Prompts, Style, find_style
from c2cserve.bench.report import Report, SloTargets, latency_table, make_report
from c2cserve.terminal.output import (
    CliError,
    check_writable,
    console,
    describe_machine,
    progress_console,
)

_BODIES_OF_A_TIMED_LOOP = 4096
"""Different requests in a closed loop that only time ends; then they repeat."""
_SHOW_EVERY_S = 0.25


class Mode(StrEnum):
    CLOSED = "closed"
    POISSON = "poisson"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything that decides what is sent; recorded with the results."""

    url: str
    models: tuple[str, ...]
    mode: Mode
    concurrency: int
    rate_per_s: float
    requests: int | None
    duration_s: float | None
    input_len: str
    output_len: str
    dataset: Path | None
    trace: Path | None
    where: tuple[str, ...]
    compress: float
    popularity: str
    input_cap: int | None
    output_cap: int | None
    endpoint: Endpoint
    prompt: PromptKind
    ignore_eos: bool
    temperature: float
    slo_ttft_s: float
    slo_tpot_s: float
    seed: int
    processes: int
    timeout_s: float


def run_serve(
    options: ServeOptions, key: str | None, admin_key: str | None, out: Path | None
) -> None:
    """Measure a server under load. Raises `CliError` if no request was answered."""
    _check(options)
    check_writable(out)
    models = resolve_models(options.url, options.models, key)
    shapes = plan_shapes(options, models)
    used = sorted({shape.model for shape in shapes})
    prompts = Prompts(
        options.seed, Options(options.endpoint, options.ignore_eos, options.temperature)
    )
    styles = asyncio.run(_find_styles(options, key, used, prompts))
    load = Load(
        url=options.url,
        path=options.endpoint.path,
        requests=prompts.plan(shapes, styles),
        api_key=key,
        concurrency=options.concurrency if options.mode is Mode.CLOSED else None,
        duration_s=options.duration_s if options.mode is Mode.CLOSED else None,
        timeout_s=options.timeout_s,
    )
    before = read_phases(options.url, admin_key)
    outcome = _send(load, options.processes)
    phases = read_phases(options.url, admin_key).since(before)
    slo = SloTargets(options.slo_ttft_s, options.slo_tpot_s)
    report = make_report(outcome, slo, options.processes)
    _show(report, phases)
    if out is not None:
        results = {"models": models, **report.as_json(), "phases": asdict(phases)}
        write_results(out, "serve", asdict(options), results)
    if report.total.ok == 0:
        raise CliError("no request was answered: " + "; ".join(report.warnings))


def _check(options: ServeOptions) -> None:
    """Raise `CliError` for options that make no sense, before the server is asked."""
    if (options.mode is Mode.TRACE) != (options.trace is not None):
        raise CliError("--mode trace and --trace FILE need each other", 2)
    for path in (options.trace, options.dataset):
        if path is not None and not path.is_file():
            raise CliError(f"{path}: no such file")
    _where(options.where)
    bench_plan.parse_lengths(options.input_len)
    bench_plan.parse_lengths(options.output_len)
    bench_plan.parse_popularity(options.popularity, ("any",))


def resolve_models(url: str, names: Sequence[str], key: str | None) -> list[str]:
    """Return the names; `all` stands for those of `/v1/models`. Raises `CliError`."""
    if list(names) != ["all"]:
        return list(names)
    try:
        listed = [str(model["id"]) for model in json.loads(ask(url, "/v1/models", key=key))["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(f"{url}: /v1/models is not a list of models: {error!r}") from error
    if not listed:
        raise CliError(f"{url} serves no models")
    return listed


def plan_shapes(options: ServeOptions, models: Sequence[str]) -> list[Shape]:
    """Plan every request of the run, without bodies. Raises `CliError`."""
    rng = random.Random(options.seed)
    where = _where(options.where)
    pairs = _pairs(options, where)
    weights = bench_plan.parse_popularity(options.popularity, models)
    requests, duration_s = options.requests, options.duration_s
    if options.mode is Mode.TRACE:
        assert options.trace is not None
        trace = bench_plan.TraceOptions(
            options.trace, where, options.compress, requests, duration_s
        )
        shapes = bench_plan.trace(trace, models, pairs, rng)
    elif options.mode is Mode.POISSON:
        if requests is None and duration_s is None:
            requests = 100
        shapes = bench_plan.poisson(
            models, weights, options.rate_per_s, requests, duration_s, pairs, rng
        )
    else:
        count = requests or (100 if duration_s is None else _BODIES_OF_A_TIMED_LOOP)
        shapes = bench_plan.closed_loop(models, weights, count, pairs, rng)
    if not shapes:
        raise CliError("no request is due within the duration: raise --duration or --rate", 2)
    caps = Caps(options.input_cap, options.output_cap)
    return [
        Shape(shape.model, *caps.apply(shape.input_tokens, shape.output_tokens), shape.due_s)
        for shape in shapes
    ]


def _where(conditions: Sequence[str]) -> dict[str, str]:
    pairs = [condition.partition("=") for condition in conditions]
    if any(not equals for _, equals, _ in pairs):
        raise CliError("--where takes COLUMN=VALUE", 2)
    return {column: value for column, _, value in pairs}


def _pairs(options: ServeOptions, where: Mapping[str, str]) -> Pairs:
    if options.dataset is not None:
        return bench_plan.dataset_lengths(options.dataset, where)
    return bench_plan.sampled_lengths(
        bench_plan.parse_lengths(options.input_len), bench_plan.parse_lengths(options.output_len)
    )


async def _find_styles(
    options: ServeOptions, key: str | None, models: Sequence[str], prompts: Prompts
) -> dict[str, Style]:
    client = Client(options.url, key, time.monotonic(), options.timeout_s)
    try:
        return {
            model: await find_style(client, model, options.prompt, prompts, options.endpoint)
            for model in models
        }
    finally:
        await client.close()


def _send(load: Load, processes: int) -> Outcome:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    total = None if load.duration_s is not None else len(load.requests)
    columns = (TextColumn("sending"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("sending", total=total)
        shown_s = 0.0

        def progress(ended: int) -> None:
            nonlocal shown_s
            if (now_s := time.monotonic()) - shown_s > _SHOW_EVERY_S:
                shown_s = now_s
                bar.update(task, completed=ended)

        return asyncio.run(generate_with(load, processes, progress))


def _show(report: Report, phases: Phases) -> None:
    screen = console()
    screen.print(latency_table(report))
    table = phase_table([("", phases)])
    if table is not None:
        screen.print(table)
    for warning in report.warnings:
        sys.stderr.write(f"warning: {warning}\n")


def write_results(
    path: Path, kind: str, config: Mapping[str, object], results: Mapping[str, object]
) -> None:
    """Write one measurement as JSON: configuration, machine and results."""
    document = {
        "benchmark": kind,
        "version": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config,
        "machine": _this_machine(),
        "results": results,
    }
    try:
        path.write_text(json.dumps(document, indent=2, default=str) + "\n")
    except OSError as error:
        raise CliError(f"{path}: cannot be written: {error}") from error


def _this_machine() -> Mapping[str, object]:
    """Describe the machine that measured. It is the server's only if that runs here too."""
    from c2cserve.devices.discover import discover
    from c2cserve.devices.gpus import GpuProblem
    from c2cserve.engine.gpu.requirements import usable_gpus

    machine = discover()
    with contextlib.suppress(GpuProblem):  # the driver's trouble is `doctor`'s to tell
        machine = replace(machine, gpus=usable_gpus())
    return describe_machine(machine)
