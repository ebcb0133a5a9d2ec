"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl
"""Found when this is imported: between fork and exec a process may not load anything."""


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, in whatever way.

    The parent is the thread that forked this process. One that has ended before is not noticed. The
    call may be a `preexec_fn` of `subprocess.Popen`. Raises OSError."""
    if _prctl(_PR_SET_PDEATHSIG, by) != 0:
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
