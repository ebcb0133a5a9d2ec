"""The fork server of a server's workers, which the command line starts ahead of its own imports.

Both import for about as long, so the first token comes sooner by the time that the server's take.
This module and those that it uses are small.
"""

import contextlib
import sys
from collections.abc import Sequence

from c2cserve.runtime.environment import child_environment
from c2cserve.serving.ipc.forks import ForkServer

# The kernels bring their own thread pool; a library that spins up another one per worker would
# fight it for the slice's cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FORK_SERVER = (sys.executable, "-m", "c2cserve.cli.main", "worker")

_NEED_NONE = frozenset({"-h", "--help", "--cluster"})

_prestarted: list[ForkServer] = []


def prestart(options: Sequence[str] = ()) -> None:
    """Start a fork server, which the next `fork_server` returns. It ends with this process.

    `options` of a server that only show help, or name a cluster's workers, need none. Where it
    fails, for want of processes or descriptors, `fork_server` tries again and says why."""
    if not _NEED_NONE & {option.partition("=")[0] for option in options}:
        with contextlib.suppress(OSError):
            use(_started())


def use(server: ForkServer) -> None:
    """Have the next `fork_server` return this one."""
    _prestarted.append(server)


def fork_server() -> ForkServer:
    """Return the fork server that was started ahead, or start one. Raises OSError."""
    return _prestarted.pop() if _prestarted else _started()


def _started() -> ForkServer:
    return ForkServer(FORK_SERVER, child_environment(**ONE_THREAD))
