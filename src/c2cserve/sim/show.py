"""Tables of `c2cserve simulate`."""

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from c2cserve.sim.report import Report
from c2cserve.sim.run import Scenario
from c2cserve.sim.studies.registry import StudyResult
from c2cserve.sim.world.hardware import find
from c2cserve.terminal.output import console, show_bytes, show_seconds


def show_without_relays(result: Report, without: Report) -> None:
    """Show what it changes that GPUs relay loads for each other."""
    table = make_table("GPUs that relay loads for each other", ("", "with", "without"))
    rows: tuple[tuple[str, Callable[[Report], str]], ...] = (
        ("TTFT p50", lambda one: show_seconds(one.ttft.p50)),
        ("TTFT p99", lambda one: show_seconds(one.ttft.p99)),
        ("TPOT p50", lambda one: show_seconds(one.tpot.p50)),
        ("both targets met", lambda one: f"{one.slo_attainment:.1%}"),
    )
    for name, value in rows:
        table.add_row(name, value(result), value(without))
    console().print(table)


def show(scenario: Scenario, result: Report) -> None:
    heads = ("", "mean", "p50", "p90", "p95", "p99", "within target")
    table = make_table(f"{scenario.policy} on {scenario.hardware}: {scenario.catalog}", heads)
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
    out.print(step_times(scenario.hardware))
    out.print(_slices(result))
    links = _links(result)
    if links.row_count:
        out.print(links)


def step_times(hardware: str) -> str:
    """Return the line that says how far to trust a machine's step times. Raises UnknownHardware,
    OSError, ValueError."""
    machine = find(hardware.partition(":")[0])
    known = machine.step_error or "of its file, compared with no measurement."
    return f"Step times of {machine.name}: {known}"


def _slices(result: Report) -> Table:
    heads = ("slice", "computing", "in use", "held", "steps", "switches", "loads", "streamed")
    table = make_table("Slices (shares of the time)", heads)
    for name, node in result.nodes.items():
        shares = (f"{share:.0%}" for share in (node.busy, node.used, node.held))
        counts = (str(node.steps), str(node.switches), str(node.loads))
        table.add_row(name, *shares, *counts, show_bytes(node.streamed_bytes))
    return table


def _links(result: Report) -> Table:
    table = make_table("Links", ("link", "moved", "mean rate", "busy"))
    for name, link in result.links.items():
        if link.moved_bytes > 0 and not name.endswith("compute"):
            rate = f"{link.mean_bytes_per_s / 1e9:.1f} GB/s"
            table.add_row(name, show_bytes(link.moved_bytes), rate, f"{link.busy_share:.0%}")
    return table


def show_study(result: StudyResult) -> None:
    table = make_table(result.title, ("", "ours", "published", "note"))
    for finding in result.findings:
        table.add_row(finding.what, finding.ours, finding.published, finding.note)
    console().print(table)


def show_studies(studies: Mapping[str, str]) -> None:
    for name, what in studies.items():
        console().print(f"{name}: {what}")


def make_table(title: str, heads: Sequence[str]) -> Table:
    """The first column holds names, the others figures."""
    table = Table(title=title)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    return table
