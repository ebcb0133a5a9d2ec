"""Links that are a thread, which copies this process's memory: for tests of the engine's thread."""

import ctypes
import threading
from collections.abc import Sequence
from itertools import count
from queue import SimpleQueue

import torch
from called_links import LinkFault, Piece, Task

from c2cserve.transfer.moves import Port


class Streams:
    """Streams by their handles: each is open, unless it is in `closed`."""

    def __init__(self) -> None:
        self.closed: set[int] = set()
        self._numbers = count(1)

    def make(self, *, is_open: bool = True) -> "Stream":
        stream = Stream(next(self._numbers))
        if not is_open:
            self.closed.add(stream.cuda_stream)
        return stream


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.device = torch.device("cuda", 0)


class ThreadLinks:
    """Links whose names are in `failing` answer with errors, in `stuck` stand still."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.failing: set[str] = set()
        self.stuck: set[str] = set()
        self.begin_when_stuck = False
        """Those that are stuck have begun: they are not harmless when they are recalled."""
        self.looks = 0
        self._over: set[tuple[Port, int]] = set()
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        while (task := self._queue.get()) is not None:
            self.copy(task.pieces)
            self.end(task)

    def end(self, task: Task) -> None:
        self._over.add(task.key)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(20)

    # ---- links ----------------------------------------------------------------------------------

    def start(self, task: Task) -> None:
        if task.link.name in self.failing:
            raise LinkFault
        self._over.discard(task.key)
        if not task.relayed or task.link.name not in self.stuck:
            self._queue.put(task)

    def is_over(self, task: Task) -> bool:
        self.looks += 1
        return task.key in self._over

    def recall(self, task: Task) -> None:
        pass

    def is_harmless(self, task: Task) -> bool:
        return not self.begin_when_stuck

    def is_passed(self, stream: int) -> bool:
        self.looks += 1
        return stream not in self.streams.closed

    def copy(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            ctypes.memmove(piece.target, piece.source, piece.size)
