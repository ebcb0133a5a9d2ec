"""Links as arithmetic, with memory behind them, for the scheduler: a virtual clock and a heap."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from c2cserve.transfer.engine import LinkError
from c2cserve.transfer.moves import HOST, Port, Segment, cut
from c2cserve.transfer.schedule import Outstanding, Schedule, Transfer
from c2cserve.transfer.settings import Settings

INWARD, OUTWARD = "in", "out"


def mesh(gpus: int) -> dict[Port, list[Port]]:
    """Every link of every GPU, each relaying for all others of its direction."""
    relays: dict[Port, list[Port]] = {}
    for gpu in range(gpus):
        others = [other for other in range(gpus) if other != gpu]
        relays[Port(gpu, "in")] = [Port(other, "in") for other in others]
        relays[Port(gpu, "out")] = [Port(other, "out") for other in others]
        relays |= {Port(gpu, "peer", other): [] for other in others}
    return relays


@dataclass(frozen=True)
class Stall:
    """From `start_s` to `end_s` a link carries no relay; `error`: it answers with one instead."""

    start_s: float
    end_s: float = math.inf
    error: bool = False


@dataclass
class _Carried:
    one: Outstanding
    begins_s: float
    ends_s: float


@dataclass
class Simulation:
    """`Schedule` on simulated links. All of `memory` is there once for host and every GPU."""

    gpus: int
    settings: Settings
    rates: Mapping[Port, float] = field(default_factory=dict)
    stalls: Mapping[Port, Sequence[Stall]] = field(default_factory=dict)
    memory_bytes: int = 1 << 12

    def __post_init__(self) -> None:
        relays = mesh(self.gpus)
        self.schedule = Schedule(relays, relays, self.settings)
        self.now = 0.0
        self.ended: list[tuple[Transfer, float]] = []
        self.written = {gpu: [0] * self.memory_bytes for gpu in (HOST, *range(self.gpus))}
        """How many micro-tasks that arrived have written each byte."""
        self.begun_for_ever = False
        """Relays that are recalled have begun, and never end."""
        self.late_writes = 0
        """Bytes that were written for a transfer that was over."""
        self._events: list[tuple[float, int, _Carried | None]] = []
        self._numbers = count()
        self._free_at: dict[Port, float] = {}
        self._carried: dict[Outstanding, _Carried] = {}

    def submit(self, segments: Iterable[Segment], *, background: bool = False) -> Transfer:
        transfer = Transfer(background)
        tasks = [
            task
            for one in segments
            for task in cut([one], self.settings.task_bytes_of(one.port), 4)
        ]
        self.schedule.add(transfer, tasks)
        self._after()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        self.schedule.cancel(transfer)
        self._after()

    def break_link(self, port: Port, fault: Exception) -> None:
        """Let what a link carries end with an error."""
        for one in list(self.schedule.outstanding(port)):
            del self._carried[one]
            self.schedule.failed(one, fault)
        self._after()

    def run(self, until_s: float = math.inf) -> None:
        """Go on until nothing is left to happen, or to a time."""
        while True:
            wake_s = self.schedule.wakes_at(self.now)
            next_s = min(wake_s, self._events[0][0] if self._events else math.inf)
            if next_s > until_s or next_s == math.inf:
                self.now = max(self.now, until_s) if until_s < math.inf else self.now
                return
            assert next_s >= self.now, "the clock would go back"
            self.now = next_s
            while self._events and self._events[0][0] <= self.now:
                carried = heapq.heappop(self._events)[2]
                if carried is not None:
                    self._over(carried)
            self._after()

    def _after(self) -> None:
        for one in self.schedule.stalled(self.now):
            self._recall(one)
        for port in self.schedule.carriers():
            while (one := self.schedule.pull(port, self.now)) is not None:
                self._start(one)
        for port in self.schedule.ports:
            assert self.schedule.pull(port, self.now) is None, "links have all that they can take"
            taken = self.schedule.outstanding(port)
            assert sum(not one.recalled for one in taken) <= self.settings.depth
            assert len({one.slot for one in taken}) == len(taken)
        for transfer in self.schedule.over:
            assert transfer.over
            assert transfer not in [other for other, _ in self.ended], "it ends once"
            self.ended.append((transfer, self.now))
        self.schedule.over.clear()

    def _stall(self, one: Outstanding, at_s: float) -> Stall | None:
        stalls = self.stalls.get(one.port, ()) if one.relayed else ()
        return next((stall for stall in stalls if stall.start_s <= at_s < stall.end_s), None)

    def _start(self, one: Outstanding) -> None:
        stall = self._stall(one, self.now)
        if stall is not None and stall.error:
            self.schedule.failed(one, LinkError("simulated"))
            return
        begins_s = max(self.now, self._free_at.get(one.port, 0.0))
        if (stall := self._stall(one, begins_s)) is not None:
            begins_s = stall.end_s
        ends_s = begins_s + one.task.size / self.rates.get(one.port, 1.0)
        if (stall := self._stall(one, ends_s)) is not None and begins_s < stall.start_s:
            ends_s = stall.end_s  # it stands still in the middle
        carried = self._carried[one] = _Carried(one, begins_s, ends_s)
        if ends_s < math.inf:
            self._free_at[one.port] = ends_s
            heapq.heappush(self._events, (ends_s, next(self._numbers), carried))

    def _recall(self, one: Outstanding) -> None:
        carried = self._carried[one]
        if self.begun_for_ever:
            return
        if carried.begins_s > self.now:
            self.schedule.give_up(one)  # it has not begun, and never writes
        else:
            self._carried[one] = over = _Carried(one, carried.begins_s, self.now)
            heapq.heappush(self._events, (self.now, next(self._numbers), over))

    def _over(self, carried: _Carried) -> None:
        one = carried.one
        if self._carried.get(one) is not carried:
            return  # it was recalled, and ended then
        del self._carried[one]
        transfer = one.task.transfer
        if not one.recalled:
            self._write(one)
            self.late_writes += transfer.over
        self.schedule.arrived(one, self.now)

    def _write(self, one: Outstanding) -> None:
        target = HOST if one.task.port.direction == "out" else one.task.port.gpu
        for piece in one.task.pieces:
            for at in range(piece.target, piece.target + piece.size):
                self.written[target][at] += 1
