"""`c2cserve plan`: how many models a machine serves within their targets, or which machine a
catalogue needs, by simulation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.cli import simulate as options
from c2cserve.sim import compiled
from c2cserve.terminal.output import check_writable, console

if TYPE_CHECKING:
    from c2cserve.sim.planning.result import Plan, Wishes
    from c2cserve.sim.run import Scenario

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
    ctx: typer.Context,
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
    options.use_compiled(ctx)
    from c2cserve.sim.planning.result import Wishes
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
        found = _search(scenario, attainment, most, wishes, jobs)
        if plots is not None:
            options.save_plots(figures(found, attainment), plots)
        written = options.judged(ctx, {"asked": attainment, **found.as_json()})
        if options.write(out, written):
            show(scenario, found, attainment)
            console().print(f"Simulated by {compiled.status()}.")


def _search(
    scenario: "Scenario", attainment: float, most: int, wishes: "Wishes", jobs: int | None
) -> "Plan":
    from c2cserve.processes.forks import cpus, forks
    from c2cserve.serving.catalog_shapes import find_models
    from c2cserve.sim.planning.plan import Planner
    from c2cserve.sim.planning.progress import progress

    machines = scenario.hardware.split(",")
    models = find_models(scenario.catalog)
    jobs = jobs or cpus()
    # The progress bar has a thread, and the processes are forked before.
    with forks(jobs) as executor, progress() as notified:
        planner = Planner(scenario, models, attainment, notified, wishes, executor, jobs)
        if len(machines) > 1:
            return planner.smallest_machine(machines)
        return planner.largest_catalogue(machines[0], most)
