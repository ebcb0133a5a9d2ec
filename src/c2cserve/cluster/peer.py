"""One end of a connection between a front and a node: frames, and signs of life.

A peer that hangs, or is cut off, closes no connection. So each end sends something at least every
`BEAT_S`, and gives the other up when nothing has come for its timeout.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import cast

import msgspec

from c2cserve.cluster import messages as msg

log = logging.getLogger(__name__)

BEAT_S = 0.25


class Peer(asyncio.Protocol, ABC):
    """Reads frames and watches the other end. All methods run on one event loop."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: after so long without a byte, the other end is given up."""
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._heard_s = time.monotonic()
        self._looked_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self.trusted = False
        """Whether the other end has proved that it has the secret."""

    @abstractmethod
    def opened(self) -> None: ...

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Take a message. Raises msgspec.MsgspecError or ValueError for one that is none."""

    @abstractmethod
    def closed(self, reason: str) -> None:
        """The connection is over. Called once; nothing is received after it."""

    @property
    def over(self) -> bool:
        return self._over

    def send(self, message: msg.ToNode | msg.FromNode) -> None:
        if self._transport is not None and not self._over:
            self._transport.write(msg.frame(message))

    def end(self, reason: str, *, flush: bool = False) -> None:
        """Close the connection. What has not been sent yet is dropped, unless it is to be flushed:
        a peer that hangs takes nothing."""
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            (self._transport.close if flush else self._transport.abort)()
        self.closed(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of its own class
        self._heard_s = self._looked_s = time.monotonic()
        self._watch()
        self.opened()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("the connection ended" if exc is None else f"the connection broke: {exc}")

    def data_received(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        self._buffer += data
        start = 0
        try:
            while not self._over and len(self._buffer) - start >= msg.HEAD_BYTES:
                begin = start + msg.HEAD_BYTES
                size = int.from_bytes(self._buffer[start:begin], "little")
                if size > (msg.FRAME_BYTES_MAX if self.trusted else msg.STRANGER_BYTES_MAX):
                    raise ValueError(f"a frame of {size} bytes")
                if len(self._buffer) < begin + size:
                    break
                start = begin + size
                self.received(bytes(self._buffer[begin:start]))
        except (msgspec.MsgspecError, ValueError) as error:
            if self.trusted:  # it may be right, and the fault be in what takes its messages
                log.exception("a message of a peer cannot be taken")
            self.end(f"a message that cannot be read: {error}")
        del self._buffer[:start]

    def _watch(self) -> None:
        """Beat, and look whether the other end does."""
        now = time.monotonic()
        if now - self._looked_s > self._timeout_s / 2:
            # This process was stopped itself: what came meanwhile is still to be read.
            self._heard_s = max(self._heard_s, now - self._timeout_s / 2)
        self._looked_s = now
        if now - self._heard_s > self._timeout_s:
            self.end(f"no sign of life for {self._timeout_s:g} s")
            return
        self.send(msg.Beat())
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._watch)
