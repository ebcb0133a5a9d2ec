"""The command line that the system shows of this process, where it may be written over."""

from pathlib import Path

_ARG_START = 45
"""Index of `arg_start` among the fields behind a process's name in /proc/PID/stat
(proc_pid_stat(5), field 48)."""


def shown_arguments() -> tuple[int, bytes]:
    """Return the address of this process's arguments, and what is there: each ends with NUL."""
    shown = Path("/proc/self/cmdline").read_bytes()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[_ARG_START]), shown
