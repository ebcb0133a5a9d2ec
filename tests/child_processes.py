"""Processes that another one has started."""

from pathlib import Path


def children_of(pid: int, module: str = "") -> list[int]:
    """Return those that any thread of a process started, in order, and that it has not waited for.
    With `module`, only those whose command line has it as an argument."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(map(int, (thread / "children").read_text().split()))
        except OSError:  # the thread has just ended
            continue
    return sorted(child for child in found if not module or module in _command_line(child))


def _command_line(pid: int) -> list[str]:
    """An empty one if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
