"""The parts that all commands share: failures, and showing sizes, times and JSON."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from c2cserve.core.machine import Machine


class CliError(Exception):
    """The command cannot go on; the message is one line that says what to do.

    `exit_code`: 1 for a failure, 2 for a command line that makes no sense.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CliErrors(CliError):
    """Several reasons why the command cannot go on, a line each."""

    def __init__(self, messages: Sequence[str], exit_code: int = 1) -> None:
        super().__init__("; ".join(messages), exit_code)
        self.messages = messages


def check_writable(path: Path | None) -> None:
    """Raise CliError if the results cannot be written there, before they are measured."""
    if path is None or str(path) == "-":
        return
    if not path.parent.is_dir():
        raise CliError(f"{path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CliError(f"{path}: no file can be written there")


def console() -> "Console":
    """Return a console for tables on stdout. Without a terminal, tables are as wide as need be."""
    from rich.console import Console

    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=160)


def progress_console() -> "Console":
    """Return a console for progress on stderr; it is quiet without a terminal."""
    from rich.console import Console

    out = Console(stderr=True)
    return out if out.is_terminal else Console(stderr=True, quiet=True)


def print_json(value: Mapping[str, object] | Sequence[object]) -> None:
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_columns(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> None:
    """Print plain columns under their heads. Tables with borders take a millisecond a row, these
    some microseconds. `numbers`: how many of the last columns are numbers."""
    lines = [[_printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first_number = len(heads) - numbers
    for line in lines:
        cells = [
            cell.rjust(width) if number >= first_number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _printable(cell: str) -> str:
    """Return a cell that moves no cursor and begins no line."""
    return cell if cell.isprintable() else "".join(c if c.isprintable() else "?" for c in cell)


def show_bytes(count: float) -> str:
    """Return a size such as `1.5 GiB`; whole numbers below 1 KiB."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024 or unit == "TiB":
            return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"
    raise AssertionError("unreachable: the last unit takes everything")


def show_seconds(seconds: float) -> str:
    """Return a time such as `850 us`, `12.3 ms` or `4.56 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def describe_machine(machine: "Machine") -> dict[str, object]:
    """Return the facts about a machine that belong beside a measurement."""
    return {
        "cpu": machine.cpu_name,
        "cpus": len(machine.cpus),
        "cores": len(machine.cores),
        "cpu_quota": machine.cpu_quota,
        "numa_nodes": len(machine.numa),
        "memory_bytes": machine.memory_bytes,
        "isa": list(machine.isa),
        "gpus": [gpu.name for gpu in machine.gpus],
    }
