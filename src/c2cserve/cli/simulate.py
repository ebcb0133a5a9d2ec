"""`c2cserve simulate`: the server's own policies on machines, models and requests that need not
exist."""

import json
from collections.abc import Generator, Iterable, Set
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from c2cserve.sim import compiled
from c2cserve.terminal.output import CliError, check_writable, console, print_json

if TYPE_CHECKING:
    from c2cserve.sim.run import Scenario
    from c2cserve.sim.studies.figure import Figure
    from c2cserve.sim.workload.build import WorkloadSettings

Hardware = Annotated[str, typer.Option(help="MACHINE, MACHINE:LAYOUT, or a TOML file.")]
Catalog = Annotated[
    str, typer.Option(help="SHAPE*COUNT,... e.g. llama-3.1-8b*64, or a server's catalogue file.")
]
Trace = Annotated[str, typer.Option(help="A packaged trace, a CSV file, or synthetic:rate=5,...")]
Policy = Annotated[str, typer.Option(help="A preset of policies.")]
SloText = Annotated[
    str, typer.Option(help="TTFT,TPOT in seconds, slinfer, or catalog: each model's own.")
]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
TimeScale = Annotated[float, typer.Option(min=1e-6, help="Run the trace so many times as fast.")]
Start = Annotated[float, typer.Option(min=0, help="Skip so many seconds of the trace.")]
Duration = Annotated[float | None, typer.Option(min=0, help="Use so many seconds of it.")]
RateScale = Annotated[float, typer.Option(min=1e-6, help="Times the trace's requests.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most so many requests.")]
Lengths = Annotated[str, typer.Option(help="Lengths for traces that have none.")]
Mapping = Annotated[str, typer.Option(help="Sources to models: order or shuffle.")]
Where = Annotated[
    list[str] | None, typer.Option(help="COLUMN=VALUE: only these lines of the trace.")
]
KvShare = Annotated[float, typer.Option(min=0.05, max=1, help="Of a slice's memory, for KV.")]
MaxActive = Annotated[
    int | None, typer.Option(min=1, help="Models active on a slice at a time [default: a server's]")
]
Relays = Annotated[
    bool, typer.Option("--gpu-relays", help="GPUs lend each other their links; with and without.")
]
Noise = Annotated[float, typer.Option(min=0, help="Spread of step times.")]
Patience = Annotated[float, typer.Option(min=0, help="Refuse after so many TTFT targets; 0: never")]
Faults = Annotated[
    list[str] | None,
    typer.Option("--fault", help="slice:ID@AT+FOR or link:ID@AT+FOR*SHARE, in seconds."),
]
Hybrid = Annotated[bool, typer.Option(help="C2CServe's hybrid GEMMs instead of ours.")]
RecordTo = Annotated[
    Path | None, typer.Option("--record", help="Record it here, for replay --dashboard.")
]
Out = Annotated[Path | None, typer.Option("--json", help="Write the report here; - for stdout.")]
Study = Annotated[str, typer.Option(help="Run a study instead; `list` names them.")]
Plots = Annotated[Path | None, typer.Option(help="Write the study's plots to this folder.")]
Quick = Annotated[bool, typer.Option(help="A small part of the study.")]


_OF_STUDIES = {"plots", "quick"}
_OF_BOTH = {"study", "trace", "seed", "out"}
_FILES = {"plots", "out", "record"}
"""Where a command writes to, which changes no result."""


def simulate(
    ctx: typer.Context,
    hardware: Hardware = "h200-x1",
    catalog: Catalog = "llama-3.1-8b*64",
    trace: Trace = "",
    policy: Policy = "c2cserve",
    slo: SloText = "catalog",
    seed: Seed = 0,
    time_scale: TimeScale = 1,
    start_s: Start = 0,
    duration_s: Duration = None,
    rate_scale: RateScale = 1,
    limit: Limit = None,
    lengths: Lengths = "azure-conv",
    mapping: Mapping = "order",
    where: Where = None,
    kv_share: KvShare = 0.5,
    max_active: MaxActive = None,
    lanes: Annotated[
        int, typer.Option(min=1, max=2, help="Lanes of a whole GPU; 2: streams beside the rest.")
    ] = 1,
    relays: Relays = False,
    noise: Noise = 0.05,
    patience: Patience = 20,
    faults: Faults = None,
    hybrid: Hybrid = False,
    out: Out = None,
    study: Study = "",
    plots: Plots = None,
    quick: Quick = False,
    record: RecordTo = None,
) -> None:
    """Simulate a server: deterministic by its seed."""
    use_compiled(ctx)
    from c2cserve.sim.run import Scenario
    from c2cserve.sim.world.faults import parse_fault
    from c2cserve.sim.world.hardware import SliceSettings

    with mistakes():
        _check_options(ctx, study)
        check_writable(out)
        check_writable(record)
        if study:
            _study(ctx, out, plots)
            return
        workload = workload_settings(
            trace or "slinfer64", seed, time_scale, start_s, duration_s, limit, rate_scale, lengths,
            mapping, where,
        )  # fmt: skip
        scenario = Scenario(
            hardware, catalog, workload, slo, policy,
            slices=SliceSettings(
                kv_share=kv_share, max_active=max_active, lanes=lanes, relays=relays
            ),
            patience=patience, seed=seed, noise=noise, hybrid=hybrid,
            faults=tuple(map(parse_fault, faults or [])),
        )  # fmt: skip
        _scenario(ctx, scenario, out, record)


def use_compiled(ctx: typer.Context) -> None:
    """Simulate with compiled policies if there are any, and note that for `judged`."""
    ctx.meta["policies"] = compiled.status() if compiled.use() else "pure Python"


def _check_options(ctx: typer.Context, study: str) -> None:
    """Raise CliError for an option that would have no effect.

    A study has its own machines, models and load. A single simulation has no plots."""
    names = {one.name: one.opts[0] for one in ctx.command.params}
    given = {name for name in names if _is_given(ctx, name)} - _OF_BOTH
    wrong = given - _OF_STUDIES if study else given & _OF_STUDIES
    if wrong:
        shown = ", ".join(sorted(names[name] for name in wrong))
        raise CliError(f"{shown}: no effect {'with' if study else 'without'} --study", 2)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


@contextmanager
def mistakes() -> Generator[None]:
    """Turn errors of a simulation's settings into one line."""
    try:
        yield
    except OSError as error:
        if error.filename is None:  # not a file of the settings'
            raise
        raise CliError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise CliError(str(error), 2) from error


def workload_settings(
    trace: str,
    seed: int,
    time_scale: float,
    start_s: float,
    duration_s: float | None,
    limit: int | None,
    rate_scale: float,
    lengths: str,
    mapping: str,
    where: list[str] | None,
) -> "WorkloadSettings":
    """Make the settings of a workload. Raises ValueError."""
    from c2cserve.sim.workload.build import WorkloadSettings

    return WorkloadSettings(
        trace=trace, seed=seed, time_scale=time_scale, start_s=start_s,
        duration_s=float("inf") if duration_s is None else duration_s, limit=limit,
        rate_scale=rate_scale,
        lengths=lengths, mapping=mapping, where=dict(map(_pair, where or [])),
    )  # fmt: skip


def _pair(text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not COLUMN=VALUE")
    return column, value


def _scenario(
    ctx: typer.Context, scenario: "Scenario", out: Path | None, record: Path | None
) -> None:
    from c2cserve.serving.catalog_shapes import find_models
    from c2cserve.sim.run import simulate as run
    from c2cserve.sim.show import show, show_without_relays

    models = find_models(scenario.catalog)
    result = run(scenario, models, record)
    written = judged(ctx, result.as_json(), _OF_STUDIES | {"study"})
    without = None
    if scenario.slices.relays:
        alone = replace(scenario, slices=replace(scenario.slices, relays=False))
        without = run(alone, models)
        written |= {"without_relays": without.as_json()}
    if write(out, written):
        show(scenario, result)
        if without is not None:
            show_without_relays(result, without)


def _study(ctx: typer.Context, out: Path | None, plots: Path | None) -> None:
    from c2cserve.sim.show import show_studies, show_study
    from c2cserve.sim.studies.registry import STUDIES, StudyOptions, run

    name = ctx.params["study"]
    if name == "list":
        show_studies(STUDIES)
        return
    check_plots(plots)
    result = run(name, StudyOptions(ctx.params["seed"], ctx.params["trace"], ctx.params["quick"]))
    if plots is not None:
        save_plots(result.figures, plots)
    others = ctx.params.keys() - _OF_BOTH - _OF_STUDIES
    if write(out, judged(ctx, result.as_json(), others)):
        show_study(result)


def judged(
    ctx: typer.Context, result: dict[str, Any], others: Set[str] = frozenset()
) -> dict[str, Any]:
    """Return a result with what is needed to judge it. `others`: options that it is not of."""
    from c2cserve.bench.provenance import provenance

    given = {name: value for name, value in ctx.params.items() if name not in others | _FILES}
    given["trace"] = Path(ctx.params["trace"]).name  # where it lies on this machine matters to none
    return provenance(**given, policies=ctx.meta["policies"]) | result


def check_plots(folder: Path | None) -> None:
    """Raise CliError if plots are asked for and cannot be drawn."""
    if folder is not None and find_spec("matplotlib") is None:
        raise CliError("plots need matplotlib: pip install '.[plots]' in the checkout")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise CliError(f"{folder}: no folder")


def save_plots(figures: "Iterable[Figure]", folder: Path) -> None:
    from c2cserve.sim.studies.plot import save

    for path in save(figures, folder):
        console().print(f"wrote {path}")


def write(out: Path | None, value: dict[str, Any]) -> bool:
    """Write JSON. Return False if it went to stdout, where nothing else may go."""
    if out is not None and str(out) == "-":
        print_json(value)
        return False
    if out is not None:
        out.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    return True
