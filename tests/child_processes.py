"""Processes that another one has started."""

from pathlib import Path


def children_of(pid: int, command: str = "") -> list[int]:
    """Return those that any thread of a process started, in order, and that it has not waited for.
    With `command`, only those whose command line contains it."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(map(int, (thread / "children").read_text().split()))
        except OSError:  # the thread has just ended
            continue
    return sorted(child for child in found if command in _command_line(child))


def _command_line(pid: int) -> str:
    """An empty one if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
