"""`c2cserve plan`: how many models a machine serves within their targets, or which machine a
catalogue needs, by simulation."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.cli import simulate as options
from c2cserve.terminal.output import check_writable, progress_console

if TYPE_CHECKING:
    from c2cserve.sim.planning.plan import Plan, Progress
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
    duration_s: options.Duration = None,
    rate_scale: options.RateScale = 1,
    limit: options.Limit = None,
    lengths: options.Lengths = "azure-conv",
    mapping: options.Mapping = "shuffle",
    where: options.Where = None,
    kv_share: options.KvShare = 0.5,
    max_active: options.MaxActive = 8,
    noise: options.Noise = 0.05,
    patience: options.Patience = 20,
    out: options.Out = None,
    plots: Plots = None,
) -> None:
    """Find the largest catalogue for a machine, or the smallest machine for a catalogue."""
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
            slices=SliceSettings(kv_share=kv_share, max_active=max_active),
            patience=patience, seed=seed, noise=noise,
        )  # fmt: skip
        found = _search(scenario, attainment, most)
        if plots is not None:
            options.save_plots(figures(found, attainment), plots)
        if options.write(out, {"asked": attainment, **found.as_json()}):
            show(scenario, found, attainment)


def _search(scenario: "Scenario", attainment: float, most: int) -> "Plan":
    from c2cserve.serving.catalog_shapes import find_models
    from c2cserve.sim.planning.plan import Planner

    machines = scenario.hardware.split(",")
    models = find_models(scenario.catalog)
    with _progress() as progress:
        planner = Planner(scenario, models, attainment, progress)
        if len(machines) > 1:
            return planner.smallest_machine(machines)
        return planner.largest_catalogue(machines[0], most)


@contextmanager
def _progress() -> "Generator[Progress]":
    """A bar on stderr: the simulation under way, and how many there were before. Where stderr is no
    terminal, a line now and then."""
    if not sys.stderr.isatty():
        yield _progress_lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("simulation {task.fields[number]}"), BarColumn(),
        TextColumn("{task.description}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("", total=1.0, number=0)
        number = 0

        def progress(what: str, share: float) -> None:
            nonlocal number
            number += share == 0.0
            bar.update(task, description=what, completed=share, number=number)

        yield progress


def _progress_lines() -> "Progress":
    said_s = time.monotonic()
    number = 0

    def progress(what: str, share: float) -> None:
        nonlocal number, said_s
        number += share == 0.0
        if (now := time.monotonic()) - said_s >= _LINE_EVERY_S:
            said_s = now
            sys.stderr.write(f"simulation {number}: {what}, {share:.0%}\n")
            sys.stderr.flush()

    return progress
