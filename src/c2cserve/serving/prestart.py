"""The children of a server that the command line starts ahead of its own imports.

They import for about as long as the server does. Started by the server, they would import after it,
one after another, before the first token. This module and those that it uses are small.
"""

import atexit
from collections.abc import Sequence

from c2cserve.processes.parent_death import kill_descendants
from c2cserve.server.settings import TextSettings
from c2cserve.server.text.start import TEXT_PROCESSES
from c2cserve.serving.controller.probe_start import PROBES
from c2cserve.serving.ipc.worker_forks import FORK_SERVERS

_NEED_NONE = frozenset({"-h", "--help", "--cluster"})


def prestart(options: Sequence[str] = ()) -> None:
    """Start the fork server of workers, the child that tries tokenizers and one text process. They
    end with this process, at once if it exits by itself.

    `options` of a server that only show help, or name a cluster's workers, need none."""
    if not _NEED_NONE & {option.partition("=")[0] for option in options}:
        atexit.register(kill_descendants)  # they notice its end when they have imported
        FORK_SERVERS.prestart()
        PROBES.prestart()
        TEXT_PROCESSES.prestart(TextSettings().memory_bytes)
