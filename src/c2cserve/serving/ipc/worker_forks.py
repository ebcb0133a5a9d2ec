"""The fork server of a server's workers. This module and those that it uses are small: the command
line starts it ahead of its imports (serving/prestart.py)."""

import sys

from c2cserve.processes.prestarted import Prestarted
from c2cserve.runtime.environment import child_environment
from c2cserve.serving.ipc.forks import ForkServer

# The kernels bring their own thread pool; a library that spins up another one per worker would
# fight it for the slice's cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FORK_SERVER = (sys.executable, "-m", "c2cserve.serving.worker.process")


def _start() -> ForkServer:
    return ForkServer(FORK_SERVER, child_environment(**ONE_THREAD))


FORK_SERVERS = Prestarted(_start)
