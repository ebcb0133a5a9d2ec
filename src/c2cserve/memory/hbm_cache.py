"""Weights that stay in a slice's HBM as they stream by, in the part of its arena that KV leaves.

    arena  [ KV slabs ......... | free | weights | weights | free | weights ]
             from the front      ^ the KV's end           from the back

KV always wins, at once and without waiting. A step says up to where its KV may lie, and the weights
below that end are dropped. Dropping takes no time, because nothing has to be written back. Work
that still reads the weights is enqueued before the work that writes KV there.

A `CachePolicy` decides which weights stay; in the product it is `policy.weights.hbm_residency`.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.peer_pool import Borrower

_ALIGNMENT = 256


class CachePolicy(Protocol):
    """Decides which weights stay. A key is the address of a weight at its home."""

    def used(self, model: str, now: float, priority: int = 0) -> None: ...

    def admit(self, model: str, key: Hashable, size: int, now: float) -> list[Hashable] | None: ...

    def would_admit(
        self, model: str, key: Hashable, size: int, now: float
    ) -> list[Hashable] | None: ...

    def shrink(self, budget_bytes: int) -> list[Hashable]: ...

    def drop(self, key: Hashable) -> None: ...

    def forget(self, model: str) -> list[Hashable]: ...


@dataclass(slots=True)
class CacheCounts:
    """Bytes of weights since the start, for `/metrics`."""

    hit_bytes: int = 0
    """Bytes read from HBM that would have crossed the link."""
    streamed_bytes: int = 0
    """Bytes read from their home. A mixture of experts counts all experts it could choose."""
    peer_bytes: int = 0
    """The part of `streamed_bytes` that came from another GPU's HBM."""
    cached_bytes: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    start: int
    stop: int
    handle: WeightHandle


class HbmCache:
    """The weight cache of one slice; implements `kernels.gpu.gemm.linear.WeightCache`.

    Not thread-safe: it belongs to the slice's thread.
    """

    def __init__(
        self, arena: Tensor, policy: CachePolicy, borrower: Borrower | None = None,
        on_drop: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`arena` is uint8 and shared with KV, which has the first `kv_end` bytes. `borrower`
        knows the weights that can be read on another GPU. `on_drop` is called with the model of
        weights that are dropped, before anything is written in their place."""
        self._on_drop = on_drop
        self._arena = arena
        self._policy = policy
        self._borrower = borrower
        self.bytes = 0
        """Bytes cached now."""
        self._entries: dict[int, _Entry] = {}
        self._starts: list[tuple[int, int]] = []
        """(start, key) of all entries, in order."""
        self._models: list[tuple[int, int, str]] = []
        """(address, bytes, model) of weights at home, in order."""
        self._now = 0.0
        self._kv_end = 0
        self._changes = 0
        self.counts = CacheCounts()

    @property
    def changes(self) -> int:
        """A number that rises whenever a weight came or went. A location that was looked up before
        may then be out of date."""
        return self._changes + (0 if self._borrower is None else self._borrower.changes)

    def add(self, model: str, address: int, size: int) -> None:
        """Note that the weights at [address, address + size) are this model's."""
        insort(self._models, (address, size, model))

    def begin_step(self, model: str, now: float, kv_end: int | None) -> None:
        """Prepare for a step of `model`. All KV of the slice lies below `kv_end` (None:
        anywhere)."""
        self._now = now
        self._policy.used(model, now)
        self.make_room(kv_end)

    def make_room(self, kv_end: int | None) -> None:
        """Drop weights: all KV that is written from now on lies below `kv_end` (None: anywhere)."""
        kv_end = self._arena.numel() if kv_end is None else kv_end
        if kv_end == self._kv_end:
            return
        self._kv_end = kv_end
        while self._starts and self._starts[0][0] < kv_end:
            key = self._starts[0][1]
            self._policy.drop(key)
            self._drop([key])
        self._drop(self._policy.shrink(self._arena.numel() - kv_end))

    def find(self, w: WeightHandle) -> WeightHandle | None:
        """Return W in HBM, None if it is not there, and count its bytes."""
        entry = self._entries.get(w.pointer)
        if entry is None:
            self.counts.streamed_bytes += w.bytes
            return None
        self.counts.hit_bytes += w.bytes
        return entry.handle

    def source(self, w: WeightHandle) -> WeightHandle:
        """Return where to read a W that is not cached."""
        source = w if self._borrower is None else self._borrower.source(w)
        if source.home == "peer":
            self.counts.peer_bytes += w.bytes
        return source

    def location(self, w: WeightHandle) -> WeightHandle:
        """Return where W is now. Count nothing."""
        entry = self._entries.get(w.pointer)
        if entry is not None:
            return entry.handle
        return w if self._borrower is None else self._borrower.source(w)

    def wants(self, w: WeightHandle) -> bool:
        """Return whether W would probably be cached if it streamed by now."""
        model = self._model_of(w.pointer)
        victims = self._policy.would_admit(model, w.pointer, w.bytes, self._now)
        if victims is None:
            return False
        return bool(victims) or self._gap(w.bytes) is not None

    def count(self, hit_bytes: int, streamed_bytes: int, peer_bytes: int) -> None:
        """Count weights that a graph read, without a `find` of each. `peer_bytes` are part of
        `streamed_bytes`."""
        self.counts.hit_bytes += hit_bytes
        self.counts.streamed_bytes += streamed_bytes
        self.counts.peer_bytes += peer_bytes

    def place(self, w: WeightHandle) -> WeightHandle | None:
        """Return memory to copy W into, None if W is not to be cached.

        `find` returns that memory from now on. So the caller fills it, on the slice's streams,
        before it does anything else.
        """
        model = self._model_of(w.pointer)
        victims = self._policy.admit(model, w.pointer, w.bytes, self._now)
        if victims is None:
            return None
        self._drop(victims)
        start = self._gap(w.bytes)
        if start is None:  # there is room, but in pieces
            self._policy.drop(w.pointer)
            return None
        memory = self._arena[start : start + w.bytes]
        handle = WeightHandle(memory.data_ptr(), w.shape, w.dtype, "hbm", memory)
        self._entries[w.pointer] = _Entry(start, start + w.bytes, handle)
        insort(self._starts, (start, w.pointer))
        self.counts.cached_bytes += w.bytes
        self.bytes += w.bytes
        self._changes += 1
        return handle

    def forget(self, model: str) -> None:
        """Drop a detached model: its addresses may come to mean something else."""
        self._drop(self._policy.forget(model))
        self._models = [one for one in self._models if one[2] != model]

    def clear(self) -> None:
        """Drop everything: some of it may not have been filled after all."""
        for key in list(self._entries):
            self._policy.drop(key)
            self._drop([key])

    def _model_of(self, address: int) -> str:
        at = bisect_right(self._models, address, key=lambda one: one[0]) - 1
        if at >= 0:
            first, size, model = self._models[at]
            if address < first + size:
                return model
        raise KeyError(f"no model has weights at {address:#x}")

    def _gap(self, size: int) -> int | None:
        """Return the start of the last gap of `size` bytes."""
        stop = self._arena.numel()
        for first, key in [*reversed(self._starts), (0, None)]:
            taken_to = self._kv_end if key is None else self._entries[key].stop
            start = (stop - size) // _ALIGNMENT * _ALIGNMENT
            if start >= taken_to:
                return start
            stop = first
        return None

    def _drop(self, keys: list[Hashable]) -> None:
        models: set[str] = set()
        for key in keys:
            assert isinstance(key, int)
            models.add(self._model_of(key))
            entry = self._entries.pop(key)
            self._starts.remove((entry.start, key))
            self.bytes -= entry.stop - entry.start
            self.counts.dropped_bytes += entry.stop - entry.start
            self._changes += 1
        for model in sorted(models):
            self._on_drop(model)
