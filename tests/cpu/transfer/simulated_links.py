"""Links as arithmetic, with memory behind them: a virtual clock and a heap. The engine is the one
that serves, without its thread: it does a turn whenever anything happens."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from called_links import CalledEngine, LinkFault, Piece, Task

from c2cserve.transfer.engine import Ticket, TransferError
from c2cserve.transfer.moves import HOST, Port, Segment
from c2cserve.transfer.settings import Settings, Urgency


@dataclass(frozen=True)
class Stall:
    """From `start_s` to `end_s` a link carries no relay; `error`: it answers with one instead."""

    start_s: float
    end_s: float = math.inf
    error: bool = False


@dataclass(eq=False)
class _Carried:
    task: Task
    ticket: Ticket
    begins_s: float
    ends_s: float
    recalled: bool = False
    harmless: bool = False
    over: bool = False


@dataclass
class Simulation:
    """The engine on simulated links. All of `memory` is there once for host and every GPU."""

    gpus: int
    settings: Settings
    rates: Mapping[Port, float] = field(default_factory=dict)
    stalls: Mapping[Port, Sequence[Stall]] = field(default_factory=dict)
    memory_bytes: int = 1 << 12

    def __post_init__(self) -> None:
        self.engine = CalledEngine(self.gpus, self.settings, self, threaded=False)
        self.now = 0.0
        self.ended: list[tuple[Ticket, float]] = []
        self.written = {gpu: [0] * self.memory_bytes for gpu in (HOST, *range(self.gpus))}
        """How many micro-tasks that arrived have written each byte."""
        self.begun_for_ever = False
        """Relays that are recalled have begun, and never end."""
        self.late_writes = 0
        """Micro-tasks that wrote for a transfer that was over."""
        self._owners: dict[tuple[int, int], Ticket] = {}
        """By GPU of the target, and address in it."""
        self._events: list[tuple[float, int, _Carried | None]] = []
        self._numbers = count()
        self._free_at: dict[Port, float] = {}
        self._carried: dict[tuple[Port, int], _Carried] = {}
        self._broken: set[Port] = set()
        self._moving: list[Ticket] = []
        self._counter = count(1)

    def submit(self, segments: Iterable[Segment], *, urgency: Urgency = Urgency.LOAD) -> Ticket:
        segments = list(segments)
        ticket = self.engine.submit(segments, urgency=urgency)
        for one in segments:
            for at in range(one.target, one.target + one.size):
                self._owners[one.target_gpu, at] = ticket
        self._moving.append(ticket)
        self._turn()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        self.engine.cancel(ticket)
        self._turn()

    def break_link(self, port: Port) -> None:
        """Let what a link carries end with an error."""
        self._broken.add(port)
        self._turn()
        self._broken.remove(port)

    def run(self, until_s: float = math.inf) -> None:
        """Go on until nothing is left to happen, or to a time."""
        while True:
            due_s = self.engine.due(self.now)
            next_s = min(due_s, self._events[0][0] if self._events else math.inf)
            if next_s > until_s or next_s == math.inf:
                self.now = max(self.now, until_s) if until_s < math.inf else self.now
                return
            assert next_s >= self.now, "the clock would go back"
            self.now = next_s
            while self._events and self._events[0][0] <= self.now:
                carried = heapq.heappop(self._events)[2]
                if carried is not None and not carried.over:
                    self._end(carried)
            self._turn()

    def state(self, ticket: Ticket) -> str:
        try:
            return self.engine.state(ticket)
        except TransferError:
            return "failed"

    def _turn(self) -> None:
        self.engine.turn(self.now)
        for port in self.engine.ports:
            taken = self.engine.outstanding(port)
            assert sum(not one.recalled for one in taken) <= self.settings.depth
            assert len({one.slot for one in taken}) == len(taken)
        for ticket in [one for one in self._moving if self.state(one) != "moving"]:
            self._moving.remove(ticket)
            self.ended.append((ticket, self.now))

    def _stall(self, task: Task, at_s: float) -> Stall | None:
        stalls = self.stalls.get(task.link, ()) if task.relayed else ()
        return next((stall for stall in stalls if stall.start_s <= at_s < stall.end_s), None)

    def _end(self, carried: _Carried) -> None:
        carried.over = True
        if carried.recalled:
            return  # it saw that before it wrote, or its bytes are sent again
        self.late_writes += self.state(carried.ticket) != "moving"
        self._write(carried.task)

    def _write(self, task: Task) -> None:
        target = _target(task)
        for piece in task.pieces:
            for at in range(piece.target, piece.target + piece.size):
                self.written[target][at] += 1

    # ---- links ----------------------------------------------------------------------------------

    def start(self, task: Task) -> None:
        stall = self._stall(task, self.now)
        if stall is not None and stall.error:
            raise LinkFault
        begins_s = max(self.now, self._free_at.get(task.link, 0.0))
        if (stall := self._stall(task, begins_s)) is not None:
            begins_s = stall.end_s
        ends_s = begins_s + task.size / self.rates.get(task.link, 1.0)
        if (stall := self._stall(task, ends_s)) is not None and begins_s < stall.start_s:
            ends_s = stall.end_s  # it stands still in the middle
        ticket = self._owners[_target(task), task.pieces[0].target]
        carried = self._carried[task.key] = _Carried(task, ticket, begins_s, ends_s)
        if ends_s < math.inf:
            self._free_at[task.link] = ends_s
            heapq.heappush(self._events, (ends_s, next(self._numbers), carried))

    def is_over(self, task: Task) -> bool:
        if task.link in self._broken:
            raise LinkFault
        return self._carried[task.key].over

    def recall(self, task: Task) -> None:
        carried = self._carried[task.key]
        carried.recalled = True
        if self.begun_for_ever:
            return
        # Its link is free for others that were not recalled.
        self._free_at[task.link] = self.now
        if carried.begins_s > self.now:
            carried.harmless = True  # it has not begun, and never writes
        else:
            carried.over = True
            heapq.heappush(self._events, (self.now, next(self._numbers), None))

    def is_harmless(self, task: Task) -> bool:
        return self._carried[task.key].harmless

    def is_passed(self, stream: int) -> bool:
        return True

    def copy(self, pieces: Sequence[Piece]) -> None:
        assert not any(piece.size for piece in pieces), "no transfer is small"


def _target(task: Task) -> int:
    return HOST if task.port.direction == "out" else task.port.gpu
