"""Writing a process's log without waiting for its reader.

The log goes to stderr, which is often a pipe to `docker logs`, to journald or to a pager, or a
terminal. If its reader stops reading (ctrl-S does that to a terminal), the pipe fills up, and a
plain write blocks until there is room. The server would answer nothing meanwhile, not even
`/health`, and its workers would seem to hang. So a thread writes, and lines for which there is no
room are lost and counted.
"""

import logging
import os
import select
import stat
import threading
from collections import deque

_WAITING_BYTES_MAX = 4 << 20
"""Bytes of lines that may wait for the reader; further lines are lost."""
_FLUSH_S = 1.0
"""Time that the reader has for the last lines when the process ends."""


class LogOutput(logging.Handler):
    """Writes each record as a line to a descriptor, and never waits for its reader.

    A regular file has no reader, so its lines are written at once. If its disk is full, lines are
    lost as well. The first line that can be written again is preceded by the number of lost ones.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.lost = 0
        """Lines that were not written."""
        self._fd = fd
        self._reported = 0
        """Lost lines that the log itself has reported."""
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        """Bytes in `_lines`, and of the line that is being written."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
            self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted is logging's to report
            self.handleError(record)
            return
        with self._changed:
            if self._thread is None:
                self._note(self.lost, self._write(line, self.lost - self._reported))
            elif self._bytes + len(line) > _WAITING_BYTES_MAX:
                self.lost += 1
            else:
                self._lines.append(line)
                self._bytes += len(line)
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until the lines so far are written, for a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, _FLUSH_S)

    # ---- the thread -----------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line, lost, reported = self._lines.popleft(), self.lost, self._reported
            written = self._write(line, lost - reported)
            with self._changed:
                self._note(lost, written)
                self._bytes -= len(line)
                self._changed.notify_all()

    # ---- lines ----------------------------------------------------------------------------------

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode(errors="backslashreplace") + b"\n"

    def _write(self, line: bytes, untold: int) -> bool:
        """Write one line, and before it that `untold` lines were lost. Return whether that worked.
        Other processes write there too, so it is one call where that is possible."""
        if untold:
            line = self._line(_loss(untold)) + line
        try:
            while line:
                line = line[self._write_some(line) :]
        except OSError:
            return False
        return True

    def _write_some(self, line: bytes) -> int:
        try:
            return os.write(self._fd, line)
        except BlockingIOError:  # another process has switched the descriptor to non-blocking
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.poll()
            return 0

    def _note(self, lost: int, written: bool) -> None:
        """Count a line as written or lost. `lost`: the lost lines that it reported if written."""
        if written:
            self._reported = lost
        else:
            self.lost += 1


def _loss(lines: int) -> logging.LogRecord:
    text = "%d lines of the log were lost: its reader was too slow, or its disk full"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lines,), None)


def lost_lines() -> int:
    """Return how many lines of this process's log were lost."""
    handlers = logging.getLogger().handlers
    return sum(one.lost for one in handlers if isinstance(one, LogOutput))
