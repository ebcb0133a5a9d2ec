"""Readers for the loader's seam: held back, slowed down, failing."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class GatedReader:
    """Lets `allowed` reads through, and all after `open`; remembers the offsets asked for."""

    allowed: int = 0
    offsets: list[int] = field(default_factory=list)
    _turn: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._turn:
            self.offsets.append(offset)
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: self.allowed > 0, timeout=20), "gate never opened"
            self.allowed -= 1
        return os.preadv(fd, [buffer], offset)

    def allow(self, count: int) -> None:
        with self._turn:
            self.allowed += count
            self._turn.notify_all()

    def open(self) -> None:
        self.allow(1 << 40)

    def wait_for_reads(self, count: int) -> None:
        """Until so many reads were asked for."""
        with self._turn:
            assert self._turn.wait_for(lambda: len(self.offsets) >= count, timeout=20)


@dataclass(slots=True)
class ThrottledReader:
    """At most `piece_bytes` per read and `bytes_per_s` overall: a slow disk with short reads."""

    bytes_per_s: float
    piece_bytes: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        count = os.preadv(fd, [buffer[: self.piece_bytes]], offset)
        with self._lock:
            time.sleep(count / self.bytes_per_s)
        return count


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until it holds. Fails the test if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)
