"""A slice's streams and copies without a GPU: what is enqueued happens when the test says so.

A step writes KV and reads weights; a copy moves real bytes. So a wrong order shows as wrong bytes.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from c2cserve.core.step import LANES, Lane
from c2cserve.engine.gpu.lanes import LaneFence
from c2cserve.engine.gpu.weight_loads import LoadCopy, LoadOutcome, WeightLoads
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache

KV = 255
"""What KV looks like in the arena."""
_ROUNDS = 60
"""More than all models take turns."""
ROW = 512
"""Bytes of a row of a weight."""
TASK_BYTES = 3 * ROW
PART_BYTES = 8 * ROW
UNDER_WAY = 2
"""Micro-tasks that are under way at a time: a cancelled ticket runs as many."""


@dataclass(eq=False)
class FakeEvent:
    over: bool = False

    def query(self) -> bool:
        return self.over


Work = Callable[[], bool]
"""Does its part and returns True, or returns False if it has to wait."""


@dataclass
class FakeQueue:
    """A stream: its work is done in order, one piece for each `run`."""

    work: deque[Work] = field(default_factory=deque[Work])

    def run(self, pieces: int = 1 << 30) -> None:
        while pieces and self.work and self.work[0]():
            self.work.popleft()
            pieces -= 1

    def record(self) -> FakeEvent:
        event = FakeEvent()

        def record() -> bool:
            event.over = True
            return True

        self.work.append(record)
        return event

    def wait(self, event: FakeEvent) -> None:
        self.work.append(lambda: event.over)

    record_event, wait_event = record, wait


@dataclass(eq=False)
class FakeTicket:
    """A transfer: its micro-tasks run in order, after an event."""

    after: FakeEvent
    tasks: deque[tuple[int, int, int]]
    """(target, source, bytes) of those that have not run."""
    over: FakeEvent = field(default_factory=FakeEvent)
    cancelled: bool = False
    moved_bytes: int = 0

    def run(self) -> bool:
        """Run a micro-task, or note the end. Return whether there was anything to do."""
        if self.over.over or not (self.after.over or self.cancelled):
            return False
        if self.tasks:
            target, source, size = self.tasks.popleft()
            ctypes.memmove(target, source, size)
            self.moved_bytes += size
        self.over.over = not self.tasks
        return True


@dataclass
class FakeCopies:
    """An `engine.gpu.load_transfers.LoadTransfers`, and the lanes that it waits for. The last
    micro-tasks of a cancelled ticket run after all others, as on another link that is slow."""

    steps: FakeQueue = field(default_factory=FakeQueue)
    """The resident lane,"""
    streaming: FakeQueue = field(default_factory=FakeQueue)
    """and the other one."""
    tickets: list[FakeTicket] = field(default_factory=list[FakeTicket])
    """Those that are not over."""
    copies: int = 0
    """Micro-tasks that were submitted."""
    held: int = 0
    """How often steps were held."""
    fault: Exception | None = None

    def submit(self, copies: Sequence[LoadCopy]) -> FakeTicket:
        if self.fault is not None:
            raise self.fault
        tasks = deque(
            (one.target + at, one.source + at, min(TASK_BYTES, one.size - at))
            for one in copies
            for at in range(0, one.size, TASK_BYTES)
        )
        self.copies += len(tasks)
        self.tickets.append(FakeTicket(self.steps.record(), tasks))
        return self.tickets[-1]

    def is_over(self, ticket: FakeTicket) -> bool:
        return ticket.over.over

    def moved_bytes(self, ticket: FakeTicket) -> int:
        return ticket.moved_bytes

    def cancel(self, ticket: FakeTicket) -> None:
        begun = UNDER_WAY if ticket.after.over else 0
        while len(ticket.tasks) > begun:
            ticket.tasks.pop()
        ticket.cancelled = True
        ticket.over.over = not ticket.tasks

    def hold_steps(self, ticket: FakeTicket) -> None:
        assert ticket.cancelled, "a stream cannot follow what is queued"
        self.held += 1
        for lane in (self.steps, self.streaming):
            lane.wait(ticket.over)

    def run(self, tasks: int = 1 << 30, *, last_first: bool = False) -> None:
        """`last_first`: as over a second link that is faster."""
        for _ in range(tasks):
            self.tickets.sort(key=lambda one: one.cancelled)
            if not any(one.run() for one in self.tickets[:: -1 if last_first else 1]):
                break
            self.tickets = [one for one in self.tickets if not one.over.over]

    def synchronize(self) -> None:
        self.run()
        assert not self.tickets, "copies wait for steps that do not run"


@dataclass
class _Step:
    model: str
    lane: Lane
    kv_end: int
    over: bool = False


class FakeSlice:
    """Models with weights on the host, an arena, and steps that look at what they read."""

    def __init__(self, arena_bytes: int, rows: dict[str, list[int]], lanes: int = 1) -> None:
        """`rows` of the matrices of each model; matrix `i` of the model `m` is full of a number of
        its own. Two lanes have KV in every other row each."""
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8)
        self.host: dict[str, list[torch.Tensor]] = {}
        self.weights: dict[str, list[WeightHandle]] = {}
        number = 0
        for model, sizes in rows.items():
            self.host[model], self.weights[model] = [], []
            for count in sizes:
                number += 1
                memory = torch.full((count * ROW,), number, dtype=torch.uint8)
                shape = (count, ROW // 2)
                handle = WeightHandle(memory.data_ptr(), shape, "bfloat16", "host", memory)
                self.host[model].append(memory)
                self.weights[model].append(handle)
        self.copies = FakeCopies()
        queues = (self.copies.steps, self.copies.streaming)
        self.lanes = dict(zip(LANES[:lanes], queues, strict=False))
        self.fence = LaneFence(cast(Any, self.lanes))
        self.fence.reading = lambda model: {one.lane for one in self.flying if one.model == model}
        self.cache = HbmCache(self.arena, None, None, self.fence.dropped)
        self.now = 0.0
        self.loads = WeightLoads(
            self.cache, self.copies, lambda: self.now, self.fatal, part_bytes=PART_BYTES
        )
        self.pooled = set(rows)
        """Models that are in the pool as a whole."""
        self.kv_ends: dict[Lane, int] = dict.fromkeys(self.lanes, 0)
        """Up to where each lane's KV was written that is still in use."""
        self._steps: list[_Step] = []
        self.outcomes: list[LoadOutcome] = []
        self.checked = 0

    @staticmethod
    def fatal(fault: Exception) -> bool:
        return isinstance(fault, OSError)

    def fetch(self, model: str, kv_end: int | None = None) -> None:
        if kv_end is not None:
            self._end_kv(kv_end)
        self.loads.fetch(model, lambda: self.locate(model), kv_end)

    def locate(self, model: str) -> list[list[WeightHandle]] | None:
        """Each matrix is a layer."""
        if model not in self.host:
            raise LookupError(f"no {model}")
        return [[w] for w in self.weights[model]] if model in self.pooled else None

    def whole(self, model: str) -> bool:
        """Whether a step launched now reads all of the model in the arena."""
        return all(map(self.is_kept, self.weights[model]))

    def is_kept(self, w: WeightHandle) -> bool:
        return self.cache.location(w).home == "hbm"

    @property
    def flying(self) -> list[_Step]:
        """Steps that are launched and not over."""
        return [one for one in self._steps if not one.over]

    def _end_kv(self, kv_end: int) -> None:
        """No KV beyond this is in use any more."""
        self.kv_ends = {lane: min(end, kv_end) for lane, end in self.kv_ends.items()}

    def _kv(self, lane: Lane, end: int) -> torch.Tensor:
        """The lane's KV up to `end`."""
        if len(self.lanes) == 1:
            return self.arena[:end]
        return self.arena[:end].view(-1, ROW)[LANES.index(lane) :: 2]

    def step(self, model: str, kv_end: int, lane: Lane = "resident") -> None:
        """Launch a step: it reads KV of before and the model's weights, and writes new KV."""
        self.loads.make_room(kv_end)
        self.cache.begin_step(model, self.now, kv_end)
        self._end_kv(kv_end)
        read_to, self.kv_ends[lane] = self.kv_ends[lane], kv_end
        flying = _Step(model, lane, kv_end)
        self._steps.append(flying)
        located = [self.cache.location(w) for w in self.weights[model]]
        tensors = [
            (at.owner, home) for at, home in zip(located, self.host[model], strict=True)
            if at.home == "hbm"
        ]  # fmt: skip

        def step() -> bool:
            assert (self._kv(lane, read_to) == KV).all(), "KV was overwritten"
            for memory, home in tensors:
                assert isinstance(memory, torch.Tensor)
                assert torch.equal(memory, home), f"{model}: these are not its weights"
            self.checked += len(tensors)
            self._kv(lane, kv_end)[:] = KV
            flying.over = True
            return True

        self.lanes[lane].work.append(step)

    def poll(self) -> list[LoadOutcome]:
        found = self.loads.poll()
        self.outcomes += found
        return found

    def finish(self) -> None:
        """Let everything happen that can."""
        for _ in range(_ROUNDS):
            for lane in self.lanes.values():
                lane.run()
            self.copies.run()
            self.poll()
