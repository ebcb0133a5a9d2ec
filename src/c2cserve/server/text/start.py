"""Starting a text process. Nothing large is imported: the command line starts one ahead."""

import socket
import subprocess
import sys
from dataclasses import dataclass

from c2cserve.processes.prestarted import Prestarted
from c2cserve.runtime.environment import child_environment

# A tokenizer's own threads would fight the slices for their cores.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}


@dataclass(frozen=True, slots=True)
class StartedText:
    """A text process, and this end of its socket."""

    process: subprocess.Popen[bytes]
    end: socket.socket


def _start(memory_bytes: int) -> StartedText:
    """`memory_bytes`: the limit of its data segment."""
    end, its = socket.socketpair()
    try:
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "c2cserve.server.text.process", str(memory_bytes)],
                stdin=its.fileno(),
                env=child_environment(**_ENVIRONMENT),
                process_group=0,  # a terminal's ctrl-C is for the server
            )
    except OSError:
        end.close()
        raise
    return StartedText(process, end)


TEXT_PROCESSES = Prestarted(_start)
