"""A grammar process as its worker sees it: the process, its sockets, whether it answers."""

import contextlib
import select
import socket
import subprocess
import sys

from c2cserve.grammars.matching import Vocabulary
from c2cserve.grammars.memory import MaskMemory

_PATIENCE_S = 30.0
"""How long a build waits for a process. That is longer than any answer takes: the library bounds
its work."""
_FRAME_S = 1.0
"""How long the rest of a frame takes that has begun to come."""


class GrammarProcess:
    """One grammar process and its sockets. Its methods raise OSError where it has ended."""

    def __init__(self, vocabulary: Vocabulary, memory: MaskMemory) -> None:
        self.fills, fills = socket.socketpair()
        self.builds, builds = socket.socketpair()
        try:
            given = (fills.fileno(), builds.fileno(), memory.file)
            ends = map(str, vocabulary.ends)
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "c2cserve.grammars.process", *map(str, given),
                 vocabulary.tokens, str(vocabulary.size), *ends],
                stdin=subprocess.DEVNULL, pass_fds=given,
            )  # fmt: skip
        finally:
            fills.close()
            builds.close()
        self.fills.settimeout(_FRAME_S)
        self.builds.settimeout(_PATIENCE_S)
        self.stalled = False
        """A step waited in vain for its masks, and they have not come since."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    def alive(self) -> bool:
        return self._popen.poll() is None

    def answers(self, within_s: float) -> bool:
        """Wait for the answer to a fill. Return whether it comes within that time; also if the
        process has ended."""
        poll = select.poll()
        poll.register(self.fills, select.POLLIN)
        return bool(poll.poll(max(0.0, 1000 * within_s)))

    def end(self) -> None:
        """End it, if it has not. What waits for it on another thread is woken."""
        self._popen.kill()
        self._popen.wait()
        for one in (self.fills, self.builds):
            with contextlib.suppress(OSError):  # the other side has ended
                one.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        # Not in `end`: another thread may wait on a socket, and its number must not be reused.
        for one in (self.fills, self.builds):
            one.close()
