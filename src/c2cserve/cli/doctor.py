"""`c2cserve doctor`: what this machine has, what will be used and why, and what is in the way."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from c2cserve.serving.machine_checks import Diagnosis, Level, diagnose
from c2cserve.terminal.output import console, print_json, show_bytes

if TYPE_CHECKING:
    from rich.table import Table

_MARKS = {Level.OK: "[green]ok[/]", Level.WARN: "[yellow]warn[/]", Level.FAIL: "[red]FAIL[/]"}


def doctor(
    host: Annotated[str, typer.Option(help="Address the server would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="And its port.")] = 8000,
    pool_dir: Annotated[Path, typer.Option(help="Where weights would be shared.")] = Path(
        "/dev/shm"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine. Ends with 1 when something prevents serving."""
    diagnosis = diagnose(host, port, pool_dir)
    if as_json:
        print_json(asdict(diagnosis))
    else:
        _show(diagnosis)
    if diagnosis.failed:
        raise typer.Exit(1)


def _show(diagnosis: Diagnosis) -> None:
    screen = console()
    screen.print(_findings(diagnosis))
    if count := len(diagnosis.slices):
        pool = show_bytes(diagnosis.pool_bytes)
        plan = f"\nc2cserve serve would start {count} slice{'s' * (count > 1)} and a pool of {pool}"
        screen.print(plan, soft_wrap=True)
        screen.print(_slices(diagnosis))
    if diagnosis.failed:
        sys.stderr.write("c2cserve: this machine cannot serve until what FAILs is fixed\n")


def _findings(diagnosis: Diagnosis) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    for head in ("", "what", "found"):
        table.add_column(head)
    for finding in diagnosis.findings:
        fix = f"\n  [bold]fix:[/] {escape(finding.fix)}" if finding.fix else ""
        table.add_row(_MARKS[finding.level], finding.topic, escape(finding.text) + fix)
    return table


def _slices(diagnosis: Diagnosis) -> "Table":
    from rich.table import Table

    from c2cserve.devices.procfs import format_cpu_list

    table = Table()
    for head in ("slice", "kind", "computes on", "NUMA node", "KV arena"):
        table.add_column(head)
    for one in diagnosis.slices:
        share = one.gpu
        where = f"cpus {format_cpu_list(one.cpus)}"
        if share is not None:
            where = f"{share.sms} SMs of {share.uuid}"
        table.add_row(one.id, one.kind, where, str(one.numa), show_bytes(one.kv_bytes))
    return table
