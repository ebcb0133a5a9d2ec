"""`c2cserve plan`: how many models a machine serves within their targets, or which machine a
catalogue needs, by simulation."""

import os
import sys
import time
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.cli import simulate as options
from c2cserve.sim import compiled
from c2cserve.terminal.output import check_writable, console, progress_console

if TYPE_CHECKING:
    from c2cserve.sim.planning.plan import Plan, Progress, Wishes
    from c2cserve.sim.run import Scenario

_LINE_EVERY_S = 5.0

Hardware = Annotated[
    str,
    typer.Option(
        help="One machine: how many models fit? Several, from small to large, with commas between: "
        "which is enough? MACHINE, MACHINE:LAYOUT or a TOML file."
    ),
]
Attainment = Annotated[
    float, typer.Option(min=0.01, max=1, help="Share of requests that must meet both targets.")
]
Most = Annotated[int, typer.Option(min=1, help="Look no further than so many models.")]
Seeds = Annotated[
    int, typer.Option(min=1, help="Simulate each trial with so many seeds: the interval.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Simulations at a time; default: CPUs.")]
Layouts = Annotated[bool, typer.Option("--layouts", help="Try the machine's other layouts too.")]
Spare = Annotated[bool, typer.Option("--spare", help="Try the answer with one GPU less (N+1).")]
GpuMonth = Annotated[
    float | None, typer.Option(min=0, help="Price of a GPU a month, to compare dedicated GPUs.")
]
Seconds = Annotated[float, typer.Option(min=1, help="Use so many seconds of the trace.")]
Plots = Annotated[Path | None, typer.Option(help="Write plots to this folder.")]


def plan(
    hardware: Hardware,
    catalog: options.Catalog = "llama-3.1-8b*8",
    trace: options.Trace = "slinfer128",
    policy: options.Policy = "c2cserve",
    slo: options.SloText = "catalog",
    attainment: Attainment = 0.95,
    most: Most = 1024,
    seed: options.Seed = 0,
    time_scale: options.TimeScale = 1,
    start_s: options.Start = 0,
    duration_s: Seconds = 600,
    rate_scale: options.RateScale = 1,
    limit: options.Limit = None,
    lengths: options.Lengths = "azure-conv",
    mapping: options.Mapping = "shuffle",
    where: options.Where = None,
    kv_share: options.KvShare = 0.5,
    max_active: options.MaxActive = None,
    relays: options.Relays = False,
    noise: options.Noise = 0.05,
    patience: options.Patience = 20,
    seeds: Seeds = 5,
    jobs: Jobs = None,
    layouts: Layouts = False,
    spare: Spare = False,
    gpu_month: GpuMonth = None,
    out: options.Out = None,
    plots: Plots = None,
) -> None:
    """Find the largest catalogue for a machine, or the smallest machine for a catalogue."""
    compiled.use()
    from c2cserve.sim.planning.plan import Wishes
    from c2cserve.sim.planning.show import figures, show
    from c2cserve.sim.run import Scenario
    from c2cserve.sim.world.hardware import SliceSettings

    with options.mistakes():
        check_writable(out)
        options.check_plots(plots)
        workload = options.workload_settings(
            trace, seed, time_scale, start_s, duration_s, limit, rate_scale, lengths, mapping, where
        )
        scenario = Scenario(
            hardware, catalog, workload, slo, policy,
            slices=SliceSettings(kv_share=kv_share, max_active=max_active, relays=relays),
            patience=patience, seed=seed, noise=noise,
        )  # fmt: skip
        wishes = Wishes(seeds, layouts, spare, gpu_month)
        found = _search(scenario, attainment, most, wishes, jobs or len(os.sched_getaffinity(0)))
        if plots is not None:
            options.save_plots(figures(found, attainment), plots)
        if options.write(out, {"asked": attainment, **found.as_json()}):
            show(scenario, found, attainment)
            console().print(f"Simulated by {compiled.status()}.")


def _search(
    scenario: "Scenario", attainment: float, most: int, wishes: "Wishes", jobs: int
) -> "Plan":
    from c2cserve.serving.catalog_shapes import find_models
    from c2cserve.sim.planning.plan import Planner

    machines = scenario.hardware.split(",")
    models = find_models(scenario.catalog)
    # Spawned: nothing of this process, as its progress bar's thread, is copied into the others.
    spawned = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=compiled.use)
    with spawned as pool, _progress() as progress:
        executor = pool if jobs > 1 else None
        planner = Planner(scenario, models, attainment, progress, wishes, executor, jobs)
        if len(machines) > 1:
            return planner.smallest_machine(machines)
        found = planner.largest_catalogue(machines[0], most)
        pool.shutdown(cancel_futures=True)  # those that were begun in advance and are not needed
        return found


@contextmanager
def _progress() -> "Generator[Progress]":
    """A bar on stderr: what was simulated last, and about how long the rest takes. Where stderr is
    no terminal, a line now and then."""
    if not sys.stderr.isatty():
        yield _progress_lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("", total=None, left="")
        began_s = time.monotonic()

        def progress(what: str, done: int, left_s: float) -> None:
            elapsed_s = time.monotonic() - began_s
            left = f"about {left_s:.0f} s left"
            bar.update(
                task, description=what, completed=elapsed_s, total=elapsed_s + left_s, left=left
            )

        yield progress


def _progress_lines() -> "Progress":
    said_s = time.monotonic()

    def progress(what: str, done: int, left_s: float) -> None:
        nonlocal said_s
        if (now := time.monotonic()) - said_s >= _LINE_EVERY_S:
            said_s = now
            sys.stderr.write(f"{done} simulations, about {left_s:.0f} s left: {what}\n")
            sys.stderr.flush()

    return progress
