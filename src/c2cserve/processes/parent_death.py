"""Processes that do not outlive the one that started them."""

import atexit
import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl
"""Found when this is imported: between fork and exec a process may not load anything."""


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, in whatever way.

    The parent is the thread that forked this process. One that has ended before is not noticed. The
    call may be a `preexec_fn` of `subprocess.Popen`. Raises OSError."""
    _set(_PR_SET_PDEATHSIG, by)


def _set(option: int, value: int) -> None:
    if _prctl(option, value) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end now if that was before.

    A process that starts with this needs no `preexec_fn`, which can hang where the parent has
    threads of a library with locks of its own. `parent`: the process id of the parent. Raises
    OSError and SystemExit."""
    end_with_parent()
    if os.getppid() != parent:
        raise SystemExit(1)


def kill_descendants_at_exit() -> None:
    """Have no descendant outlive this process, once it exits by itself.

    A descendant whose parent ends becomes a child of this process. What other libraries end at exit
    has ended before, if they are imported after this call. Raises OSError."""
    _set(_PR_SET_CHILD_SUBREAPER, 1)
    atexit.register(kill_descendants)


def kill_descendants() -> None:
    """Kill the children, then those that have become children by that, until there are none.

    Those become children only where this process is their "subreaper" (prctl(2))."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Return this process's children, those of all of its threads."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
