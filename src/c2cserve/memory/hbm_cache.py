"""Weights kept in a slice's HBM as they stream by ("tee"), in the part of its arena that KV leaves.

    arena  [ KV slabs ......... | free | weights | weights | free | weights ]
             from the front      ^ the KV's end           from the back

KV always wins, at once and without waiting: a step says up to where its KV may lie, and what is
kept below goes, in no time, because nothing has to be written back. Work that still reads it is
enqueued before whatever writes there next. What stays is decided elsewhere (`Keeper`, in the
product `policy.weights.hbm_residency`).
"""

from bisect import bisect_right, insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from c2cserve.kernels.gpu.gemm.weight import WeightHandle

_ALIGNMENT = 256


class Keeper(Protocol):
    """Decides what stays. Keys are addresses of weights at home."""

    def used(self, model: str, now: float, priority: int = 0) -> None: ...

    def admit(self, model: str, key: Hashable, size: int, now: float) -> list[Hashable] | None: ...

    def would_admit(
        self, model: str, key: Hashable, size: int, now: float
    ) -> list[Hashable] | None: ...

    def shrink(self, budget_bytes: int) -> list[Hashable]: ...

    def drop(self, key: Hashable) -> None: ...

    def forget(self, model: str) -> list[Hashable]: ...


class Homes(Protocol):
    """Where weights that are not kept here are read: `memory.peer_pool.Borrower`."""

    @property
    def changes(self) -> int: ...

    def source(self, w: WeightHandle) -> WeightHandle: ...


@dataclass(slots=True)
class CacheCounts:
    """Bytes of weights, since the start: for `/metrics`."""

    hit_bytes: int = 0
    """Read from HBM that would have crossed the link."""
    streamed_bytes: int = 0
    """Read from their home (of experts: all that could have been chosen)."""
    peer_bytes: int = 0
    """Of those, from a neighbour's HBM."""
    kept_bytes: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    stop: int
    handle: WeightHandle


class HbmCache:
    """`kernels.gpu.gemm.linear.Kept`. One per lane; not thread-safe, as a lane is not."""

    def __init__(self, arena: Tensor, keeper: Keeper, homes: Homes | None = None) -> None:
        """`arena`: uint8, shared with KV, whose part is `kv_end` bytes from its front. `homes`:
        where else than at their addresses weights can be read."""
        self._arena = arena
        self._keeper = keeper
        self._homes = homes
        self.bytes = 0
        """Kept now."""
        self._kept: dict[int, _Place] = {}
        self._starts: list[tuple[int, int]] = []
        """(start, key) of all places, in order."""
        self._models: list[tuple[int, int, str]] = []
        """(address, bytes, model) of weights at home, in order."""
        self._now = 0.0
        self._kv_end = 0
        self._changes = 0
        self.counts = CacheCounts()

    @property
    def changes(self) -> int:
        """Raised whenever something came or went: what was looked up before may be elsewhere."""
        return self._changes + (0 if self._homes is None else self._homes.changes)

    def add(self, model: str, address: int, size: int) -> None:
        """Weights at [address, address + size) are this model's."""
        insort(self._models, (address, size, model))

    def begin_step(self, model: str, now: float, kv_end: int | None) -> None:
        """A step of `model` is about to run; its KV, and all other, lies below `kv_end` (None:
        anywhere)."""
        self._now = now
        self._keeper.used(model, now)
        self.make_room(kv_end)

    def make_room(self, kv_end: int | None) -> None:
        """All KV that is written from now on lies below `kv_end` (None: anywhere)."""
        kv_end = self._arena.numel() if kv_end is None else kv_end
        if kv_end == self._kv_end:
            return
        self._kv_end = kv_end
        while self._starts and self._starts[0][0] < kv_end:
            key = self._starts[0][1]
            self._keeper.drop(key)
            self._drop([key])
        self._drop(self._keeper.shrink(self._arena.numel() - kv_end))

    def find(self, w: WeightHandle) -> WeightHandle | None:
        place = self._kept.get(w.pointer)
        if place is None:
            self.counts.streamed_bytes += w.bytes
            return None
        self.counts.hit_bytes += w.bytes
        return place.handle

    def source(self, w: WeightHandle) -> WeightHandle:
        """Where W, which is not kept, is to be read now."""
        there = w if self._homes is None else self._homes.source(w)
        if there.home == "peer":
            self.counts.peer_bytes += w.bytes
        return there

    def location(self, w: WeightHandle) -> WeightHandle:
        """Where W is now; nothing is counted."""
        place = self._kept.get(w.pointer)
        if place is not None:
            return place.handle
        return w if self._homes is None else self._homes.source(w)

    def wants(self, w: WeightHandle) -> bool:
        """Whether W would probably be kept if it streamed by now."""
        model = self._model_of(w.pointer)
        gone = self._keeper.would_admit(model, w.pointer, w.bytes, self._now)
        if gone is None:
            return False
        return bool(gone) or self._gap(w.bytes) is not None

    def count(self, hit_bytes: int, streamed_bytes: int, peer_bytes: int) -> None:
        """Weights that were read without being asked for one by one. `peer_bytes` are part of
        those streamed."""
        self.counts.hit_bytes += hit_bytes
        self.counts.streamed_bytes += streamed_bytes
        self.counts.peer_bytes += peer_bytes

    def place(self, w: WeightHandle) -> WeightHandle | None:
        """Memory to bring W into, from where it will be found from now on; None: it is not to be
        kept. The caller fills it, on the lane's streams, before it does anything else."""
        model = self._model_of(w.pointer)
        gone = self._keeper.admit(model, w.pointer, w.bytes, self._now)
        if gone is None:
            return None
        self._drop(gone)
        start = self._gap(w.bytes)
        if start is None:  # there is room, but in pieces
            self._keeper.drop(w.pointer)
            return None
        memory = self._arena[start : start + w.bytes]
        handle = WeightHandle(memory.data_ptr(), w.shape, w.dtype, "hbm", memory)
        self._kept[w.pointer] = _Place(start, start + w.bytes, handle)
        insort(self._starts, (start, w.pointer))
        self.counts.kept_bytes += w.bytes
        self.bytes += w.bytes
        self._changes += 1
        return handle

    def forget(self, model: str) -> None:
        """The model was detached: its addresses may come to mean something else."""
        self._models = [one for one in self._models if one[2] != model]
        self._drop(self._keeper.forget(model))

    def clear(self) -> None:
        """Keep nothing of what is here: some of it may not have been filled after all."""
        for key in list(self._kept):
            self._keeper.drop(key)
            self._drop([key])

    def _model_of(self, address: int) -> str:
        at = bisect_right(self._models, address, key=lambda one: one[0]) - 1
        if at >= 0:
            first, size, model = self._models[at]
            if address < first + size:
                return model
        raise KeyError(f"no model has weights at {address:#x}")

    def _gap(self, size: int) -> int | None:
        """The last place of `size` bytes that nothing is in."""
        stop = self._arena.numel()
        for first, key in [*reversed(self._starts), (0, None)]:
            taken_to = self._kv_end if key is None else self._kept[key].stop
            start = (stop - size) // _ALIGNMENT * _ALIGNMENT
            if start >= taken_to:
                return start
            stop = first
        return None

    def _drop(self, keys: list[Hashable]) -> None:
        for key in keys:
            assert isinstance(key, int)
            place = self._kept.pop(key)
            self._starts.remove((place.start, key))
            self.bytes -= place.stop - place.start
            self.counts.dropped_bytes += place.stop - place.start
            self._changes += 1
