"""Text processes, and the children that try tokenizers, in forks of a process that has imported
what they need.

Imports are most of what they cost, and each server of a test has two or three of them. Such a
process is a child of the one that uses it, as ever. (Servers that tests execute as a command start
theirs as users' servers do.)
"""

import ctypes
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable

from c2cserve.processes.shown_arguments import shown_arguments
from c2cserve.runtime.environment import child_environment
from c2cserve.server.text import process as text_process
from c2cserve.server.text.start import _ENVIRONMENT, TEXT_PROCESSES, StartedText
from c2cserve.serving.controller import tokenizer_probe
from c2cserve.serving.controller.probe_start import PROBES
from c2cserve.serving.ipc.forks import Adopted, Child, ForkServer
from c2cserve.serving.worker.process import fork_on_request

_SIZE = struct.Struct("<Q")
"""The first bytes that a fork reads: the memory that a text process may have, 0 for a probe."""
_ROOM = "-" * 80
"""What forks write their own arguments over."""


class _Probe(Adopted):
    """What a probe is to the server: as much of `subprocess.Popen` as it uses."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        super().__init__(pid)
        self.stdin, self.stdout = end.makefile("wb"), end.makefile("rb")


class TextForks:
    """Starts all text processes and probes of this process. Thread-safe."""

    def __init__(self, make: Callable[..., ForkServer] = ForkServer) -> None:
        self._lock = threading.Lock()
        self._make = make
        self._server: ForkServer | None = None

    def start(self) -> None:
        """Start the process that is forked; otherwise the first fork does."""
        command = (sys.executable, __file__, _ROOM)
        self._server = self._make(command, child_environment(**_ENVIRONMENT))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def replace(self) -> None:
        """Have the server that this process is start its own here."""
        TEXT_PROCESSES._start = self.text
        PROBES._start = self.probe

    def text(self, memory_bytes: int) -> StartedText:
        child, end = self._fork(memory_bytes)
        return StartedText(child, end)

    def probe(self) -> _Probe:
        child, end = self._fork(0)
        with end:
            return _Probe(child.pid, end)

    def _fork(self, memory_bytes: int) -> tuple[Child, socket.socket]:
        end, its = socket.socketpair()
        with its, self._lock:
            if self._server is None:
                self.start()
            assert self._server is not None
            self._server.ask(its)
            answered = select.poll()
            answered.register(self._server, select.POLLIN)
            while (child := self._server.answer()) is None:
                answered.poll()
        end.sendall(_SIZE.pack(memory_bytes))
        return child, end


# ---- in the process that is forked ---------------------------------------------------------------


def serve_forks(control: socket.socket) -> None:
    """Fork as the other end asks for it, until that is gone."""
    _be_shown_as("text_forks")
    end = fork_on_request(control)
    if end is not None:
        os.dup2(end, 0)
        os.close(end)
        [memory_bytes] = _SIZE.unpack(os.read(0, _SIZE.size))
        if memory_bytes:
            _be_shown_as("-m", text_process.__name__)
            text_process.main(memory_bytes)
        else:
            _be_shown_as("-m", tokenizer_probe.__name__)
            os.dup2(0, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            tokenizer_probe.main()
    os._exit(0)


def _be_shown_as(*arguments: str) -> None:
    """Tests know processes by their command lines."""
    start, shown = shown_arguments()
    line = b"".join(one.encode() + b"\0" for one in (sys.executable, *arguments))
    assert len(line) <= len(shown)
    ctypes.memmove(start, line.ljust(len(shown), b"\0"), len(shown))


if __name__ == "__main__":
    sys.path.pop(0)  # the tests' modules
    serve_forks(socket.socket(fileno=os.dup(0)))
