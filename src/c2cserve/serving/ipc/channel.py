"""Messages between the controller and one worker: a pair of stream sockets, each message behind
its length.

There is no thread in between: a message wakes the other side directly. It lies in the kernel before
`send` returns, so it survives the death of its sender.
"""

import errno
import select
import socket
import struct
from collections import deque

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 18
_LATER = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
"""Errors that are not the other side's fault: another try may succeed."""


class Channel:
    """One end. Not thread-safe; only `wait`, `next` and `drain` block."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = bytearray()
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self.closed = False
        """The other side is gone: no message arrives any more, and sent ones are lost."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def interest(self) -> int:
        """The events to poll for: messages, and room if some of ours are unsent."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, message: bytes) -> None:
        """Send a message. The part that the other side cannot take now waits for `flush`."""
        if not self.closed:
            self._unsent += _LENGTH.pack(len(message))
            self._unsent += message
            self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the other side takes it."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except OSError as error:
            if error.errno in _LATER:
                return
            self.closed = True
            self._unsent.clear()

    def drain(self, timeout_s: float) -> None:
        """Wait until the other side has taken everything, or the time is over."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(self._unsent)
        except OSError:
            self.closed = True
        self._unsent.clear()

    def receive(self) -> list[bytes]:
        """Return all messages that have arrived."""
        while not self.closed:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except OSError as error:
                if error.errno in _LATER:
                    break
                chunk = b""
            self.closed = not chunk
            self._received += chunk
            if len(chunk) < _CHUNK_BYTES:
                break
        self._split()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def _split(self) -> None:
        data, at = self._received, 0
        while len(data) - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            end = begin + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            self._messages.append(bytes(data[begin:end]))
            at = end
        del data[:at]

    def next(self) -> bytes:
        """Return the next message, waiting for it. Raises EOFError if none will come."""
        while not self._messages:
            self._messages.extend(self.receive())
            if not self._messages:
                if self.closed:
                    raise EOFError
                self.wait(None)
        return self._messages.popleft()

    def wait(self, timeout_s: float | None, also: int | None = None) -> None:
        """Wait until a message arrives, unsent bytes can be sent, the file `also` can be read, or
        the time is over."""
        poller = select.poll()
        poller.register(self, self.interest)
        if also is not None:
            poller.register(also, select.POLLIN)
        poller.poll(None if timeout_s is None else max(1, int(timeout_s * 1000)))
        self.flush()

    def close(self) -> None:
        self._socket.close()
