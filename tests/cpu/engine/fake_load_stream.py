"""A slice's streams without a GPU: what is enqueued happens when the test says so.

A step writes KV and reads weights; a copy moves real bytes. So a wrong order shows as wrong bytes.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from c2cserve.core.step import LANES, Lane
from c2cserve.engine.gpu.lanes import LaneFence
from c2cserve.engine.gpu.weight_loads import LoadOutcome, WeightLoads
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache

KV = 255
"""What KV looks like in the arena."""
_ROUNDS = 60
"""More than all models take batches."""
ROW = 512
"""Bytes of a row of a weight."""


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


@dataclass
class FakeLoadStream:
    """An `engine.gpu.load_stream.CopyEngineStream`."""

    steps: FakeQueue = field(default_factory=FakeQueue)
    """The resident lane,"""
    streaming: FakeQueue = field(default_factory=FakeQueue)
    """and the other one."""
    loads: FakeQueue = field(default_factory=FakeQueue)
    copies: int = 0
    held: int = 0
    """How often steps were held."""
    fault: Exception | None = None

    def mark_steps(self) -> FakeEvent:
        return self.steps.record()

    def wait_for_steps(self, event: FakeEvent) -> None:
        self.loads.wait(event)

    def copy(self, target: int, source: int, size: int) -> None:
        if self.fault is not None:
            raise self.fault

        def copy() -> bool:
            ctypes.memmove(target, source, size)
            return True

        self.copies += 1
        self.loads.work.append(copy)

    def record(self) -> FakeEvent:
        return self.loads.record()

    def hold_steps(self, event: FakeEvent) -> None:
        self.held += 1
        for lane in (self.steps, self.streaming):
            lane.wait(event)

    def synchronize(self) -> None:
        self.loads.run()
        assert not self.loads.work, "copies wait for steps that do not run"


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
        self.stream = FakeLoadStream()
        queues = (self.stream.steps, self.stream.streaming)
        self.lanes = dict(zip(LANES[:lanes], queues, strict=False))
        self.fence = LaneFence(cast(Any, self.lanes))
        self.fence.reading = lambda model: {one.lane for one in self.flying if one.model == model}
        self.cache = HbmCache(self.arena, None, None, self.fence.dropped)
        self.now = 0.0
        self.loads = WeightLoads(self.cache, self.stream, lambda: self.now, self.fatal)
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

    def locate(self, model: str) -> list[WeightHandle] | None:
        if model not in self.host:
            raise LookupError(f"no {model}")
        return self.weights[model] if model in self.pooled else None

    def whole(self, model: str) -> bool:
        """Whether a step launched now reads all of the model in the arena."""
        return all(self.cache.location(w).home == "hbm" for w in self.weights[model])

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
            self.stream.loads.run()
            self.poll()
