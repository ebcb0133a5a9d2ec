"""`c2cserve simulate`: the server's own policies on machines, models and requests that need not
exist."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.cli.output import CliError, console, print_json, show_bytes, show_seconds

if TYPE_CHECKING:
    from c2cserve.sim.report import Report
    from c2cserve.sim.run import Scenario


def simulate(
    hardware: Annotated[
        str, typer.Option(help="Machine, or MACHINE:LAYOUT, or a TOML file.")
    ] = "h200-x1",
    catalog: Annotated[
        str, typer.Option(help="SHAPE*COUNT,... e.g. llama-3.1-8b*64.")
    ] = "llama-3.1-8b*64",
    trace: Annotated[
        str, typer.Option(help="A packaged trace, a CSV file, or synthetic:rate=5,...")
    ] = "slinfer64",
    policy: Annotated[str, typer.Option(help="A preset of policies.")] = "c2cserve",
    slo: Annotated[str, typer.Option(help="TTFT,TPOT in seconds, or slinfer.")] = "1,0.1",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    time_scale: Annotated[float, typer.Option(min=1e-6, help="Run the trace so much faster.")] = 1,
    start_s: Annotated[float, typer.Option(min=0, help="Skip so much of the trace.")] = 0,
    duration_s: Annotated[float | None, typer.Option(min=0, help="Use so much of it.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    lengths: Annotated[str, typer.Option(help="Lengths for traces that have none.")] = "azure-conv",
    mapping: Annotated[str, typer.Option(help="Sources to models: order or shuffle.")] = "order",
    where: Annotated[
        list[str] | None, typer.Option(help="COLUMN=VALUE: only these lines of the trace.")
    ] = None,
    kv_share: Annotated[
        float, typer.Option(min=0.05, max=1, help="Of a slice's memory, for KV.")
    ] = 0.5,
    max_active: Annotated[int, typer.Option(min=1, help="Models with KV on a slice.")] = 8,
    noise: Annotated[float, typer.Option(min=0, help="Spread of step times.")] = 0.05,
    patience: Annotated[
        float, typer.Option(min=0, help="Refuse after so many TTFT targets; 0: never.")
    ] = 20,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="slice:ID@AT+FOR or link:ID@AT+FOR*SHARE, in seconds."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Simulate a server: deterministic by its seed."""
    from c2cserve.sim.faults import parse_fault
    from c2cserve.sim.hardware import SliceSettings
    from c2cserve.sim.run import Scenario
    from c2cserve.sim.run import simulate as run
    from c2cserve.sim.workload.build import WorkloadSettings

    try:
        scenario = Scenario(
            hardware=hardware,
            catalog=catalog,
            workload=WorkloadSettings(
                trace=trace, seed=seed, time_scale=time_scale, start_s=start_s,
                duration_s=float("inf") if duration_s is None else duration_s, limit=limit,
                lengths=lengths, mapping=mapping, where=dict(map(_pair, where or [])),
            ),
            slo=slo,
            policy=policy,
            slices=SliceSettings(kv_share=kv_share, max_active=max_active),
            patience=patience,
            seed=seed,
            noise=noise,
            faults=tuple(map(parse_fault, fault or [])),
        )  # fmt: skip
        result = run(scenario)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise CliError(str(error), 2) from error
    if out is None:
        show(scenario, result)
    elif str(out) == "-":
        print_json(result.as_json())
    else:
        out.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        show(scenario, result)


def _pair(text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not COLUMN=VALUE")
    return column, value


def show(scenario: "Scenario", result: "Report") -> None:
    from rich.table import Table

    table = Table(title=f"{scenario.policy} on {scenario.hardware}: {scenario.catalog}")
    for head in ("", "mean", "p50", "p90", "p95", "p99", "within target"):
        table.add_column(head, justify="right" if head else "left")
    for name, one, met in (
        ("TTFT", result.ttft, result.ttft_attainment),
        ("TPOT", result.tpot, result.tpot_attainment),
    ):
        figures = [show_seconds(v) for v in (one.mean, one.p50, one.p90, one.p95, one.p99)]
        table.add_row(name, *figures, f"{met:.1%}")
    out = console()
    out.print(table)
    out.print(
        f"{result.requests} requests in {result.duration_s:.0f} s: {result.slo_met} "
        f"({result.slo_attainment:.1%}) met both targets, {result.rejected} were refused, "
        f"{result.truncated} cut short; {result.preempted} preemptions, {result.resumed} resumed"
    )
    _show_machine(result)


def _show_machine(result: "Report") -> None:
    from rich.table import Table

    out = console()
    slices = Table(title="Slices (shares of the time)")
    heads = ("slice", "computing", "in use", "held", "steps", "switches", "loads", "streamed")
    for head in heads:
        slices.add_column(head, justify="left" if head == "slice" else "right")
    for name, node in result.nodes.items():
        shares = (f"{share:.0%}" for share in (node.busy, node.used, node.held))
        counts = (str(node.steps), str(node.switches), str(node.loads))
        slices.add_row(name, *shares, *counts, show_bytes(node.streamed_bytes))
    out.print(slices)
    links = Table(title="Links")
    for head in ("link", "moved", "mean rate", "busy"):
        links.add_column(head, justify="left" if head == "link" else "right")
    for name, link in result.links.items():
        if link.moved_bytes > 0 and not name.endswith("compute"):
            rate = f"{link.mean_bytes_per_s / 1e9:.1f} GB/s"
            links.add_row(name, show_bytes(link.moved_bytes), rate, f"{link.busy_share:.0%}")
    if links.row_count:
        out.print(links)
