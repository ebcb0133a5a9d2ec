"""Links that are threads: they copy this process's own memory, for tests of the engine."""

import ctypes
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from simulated_links import mesh

from c2cserve.transfer.engine import LinkError
from c2cserve.transfer.moves import Piece, Port, Segment
from c2cserve.transfer.schedule import Outstanding
from c2cserve.transfer.wake import Wake


class Gate:
    """An event: open once it is `set`."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._event = threading.Event()
        if is_open:
            self._event.set()

    def set(self) -> None:
        self._event.set()

    def query(self) -> bool:
        return self._event.is_set()

    def synchronize(self) -> None:
        assert self._event.wait(20)


class Stream:
    """Has a gate before, which a test opens. It knows the holds that it waits for."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.before = Gate(is_open=is_open)
        self.holds: list[int] = []


class ThreadLinks:
    """`transfer.engine.Links`. Links whose names are in `failing` raise, in `stuck` stand still."""

    pieces_max = 3

    def __init__(self, gpus: int) -> None:
        self.wake = Wake()
        self.relays = mesh(gpus)
        self.failing: set[str] = set()
        self.stuck: set[str] = set()
        self.held: set[int] = set()
        self.closed = False
        self.begun: set[Outstanding] = set()
        """Recalled ones in it are not harmless."""
        self._over: set[Outstanding] = set()
        self._numbers = iter(range(1 << 30))
        self._queue: SimpleQueue[Outstanding | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        while (one := self._queue.get()) is not None:
            copy(one.task.pieces)
            self.end(one)

    def end(self, one: Outstanding) -> None:
        self._over.add(one)
        self.wake.post()

    def check(self, segments: Sequence[Segment]) -> None:
        pass

    def start(self, one: Outstanding) -> None:
        if one.port.name in self.failing:
            raise LinkError("broken")
        if not one.relayed or one.port.name not in self.stuck:
            self._queue.put(one)

    def is_over(self, one: Outstanding) -> bool:
        return one in self._over

    def recall(self, one: Outstanding) -> None:
        self.wake.post()

    def is_harmless(self, one: Outstanding) -> bool:
        return one not in self.begun

    def mark(self, stream: Stream) -> Gate:
        return stream.before

    def hold(self, stream: Stream) -> int:
        number = next(self._numbers)
        self.held.add(number)
        stream.holds.append(number)
        return number

    def let_go(self, number: int) -> None:
        self.held.remove(number)

    def copy(self, segments: Sequence[Segment], stream: Stream | None, *, hold: bool) -> Gate:
        copy([Piece(one.target, one.source, one.size) for one in segments])
        return Gate(is_open=True)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(20)
        self.closed = True


def copy(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        ctypes.memmove(piece.target, piece.source, piece.size)


def port_of(name: str) -> Port:
    return next(port for port in mesh(4) if port.name == name)
