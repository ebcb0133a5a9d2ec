"""Weights in a slice's HBM, in the part of its arena that KV leaves.

    arena  [ KV slabs ......... | free | weights | weights | free | weights ]
             from the front      ^ the KV's end           from the back

KV always wins, at once and without waiting. A step says up to where its KV may lie, and the weights
below that end are dropped. Dropping takes no time, because nothing has to be written back. Work
that still reads the weights is enqueued before the work that writes KV there.

Weights come in one of two ways:

- Whole models: `reserve` takes places for all matrices of a model, the caller fills them, and
  `show` makes those visible that are there (`engine.gpu.weight_loads`). Policies decide which
  models: `policy.weights.weight_swapping`.
- One by one, as they stream by, where a `CachePolicy` says so: `policy.weights.hbm_residency`, on
  slices whose link is not known.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from c2cserve.kernels.gpu.gemm.weight import WeightHandle, for_libraries
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
        self, arena: Tensor, policy: CachePolicy | None, borrower: Borrower | None = None,
        on_drop: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`arena` is uint8 and shared with KV, which has the first `kv_end` bytes. Without a
        `policy` nothing is cached as it streams by. `borrower` knows the weights that can be read
        on another GPU. `on_drop` is called with the model of visible weights that are dropped,
        before anything is written in their place."""
        self._on_drop = on_drop
        self._arena = arena
        self._policy = policy
        self._borrower = borrower
        self.bytes = 0
        """Bytes cached now."""
        self._entries: dict[int, _Entry] = {}
        self._starts: list[tuple[int, int]] = []
        """(start, key) of all entries, in order, reserved ones too."""
        self._reserved: dict[int, _Entry] = {}
        """Places whose weights are not there yet."""
        self._whole: dict[str, list[int]] = {}
        """Models that `reserve` gave places -> the keys of their entries."""
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
        if self._policy is not None:
            self._policy.used(model, now)
        self.make_room(kv_end)

    def make_room(self, kv_end: int | None) -> None:
        """Drop weights: all KV that is written from now on lies below `kv_end` (None: anywhere).
        Whole models with a place there have been released."""
        kv_end = self._arena.numel() if kv_end is None else kv_end
        if kv_end == self._kv_end:
            return
        self._kv_end = kv_end
        assert not self.whole_models_below(kv_end), "whole models make room before"
        if self._policy is None:
            return
        while self._starts and self._starts[0][0] < kv_end:
            key = self._starts[0][1]
            self._policy.drop(key)
            self._drop_streamed([key])
        self._drop_streamed(self._policy.shrink(self._arena.numel() - kv_end))

    # ---- whole models ---------------------------------------------------------------------------

    def address_of(self, offset: int | None) -> int:
        """Return the address of an offset into the arena; None: of the arena's end."""
        return self._arena.data_ptr() + (self._arena.numel() if offset is None else offset)

    def reserve(self, model: str, weights: Sequence[WeightHandle]) -> list[WeightHandle] | None:
        """Take places for all of a model's weights. They become visible with `show`.

        Return the places in the order of `weights`. None, and nothing is taken, if some weight
        finds no place above the KV.
        """
        assert model not in self._whole, f"{model} has its places already"
        gaps = self._gaps()
        starts: dict[int, int] = {}
        # Large ones first: they are the ones that small gaps have no room for.
        for w in sorted(weights, key=lambda w: -w.bytes):
            start = _take_last(gaps, w.bytes)
            if start is None:
                return None
            starts[w.pointer] = start
        handles: list[WeightHandle] = []
        for w in weights:
            entry = self._entry(w, starts[w.pointer])
            self._reserved[w.pointer] = entry
            handles.append(entry.handle)
        self._starts = sorted([*self._starts, *((start, key) for key, start in starts.items())])
        self._whole[model] = list(starts)
        return handles

    def show(self, weights: Iterable[WeightHandle], *, last: bool) -> None:
        """Make weights with reserved places visible. They are there, and nothing has to wait for
        them. `last`: none of their model's are left.

        `changes` rises with the last ones alone: what was looked up before is right until then,
        since weights at home stay there. So nothing is looked up again for each part of a model.
        Handles for libraries are made here: parts come one by one, beside the rest of a load."""
        for w in weights:
            entry = self._reserved.pop(w.pointer)
            if not w.experts:
                entry = replace(entry, handle=for_libraries(entry.handle))
            self._entries[w.pointer] = entry
            self.bytes += entry.stop - entry.start
            self.counts.cached_bytes += entry.stop - entry.start
        self._changes += last

    def release(self, model: str) -> None:
        """Give back the places of a model, shown or not. Do nothing for one without places."""
        keys = self._whole.pop(model, [])
        if shown := [key for key in keys if key in self._entries]:
            self._drop(model, shown)
        for key in keys:
            if (entry := self._reserved.pop(key, None)) is not None:
                self._forget_start(entry.start, key)

    def whole_models_below(self, kv_end: int | None) -> list[str]:
        """Return the models with a reserved or shown place below the end of KV (None: anywhere)."""
        limit = self._arena.numel() if kv_end is None else kv_end
        low = {key for _, key in self._starts[: bisect_left(self._starts, (limit, -1))]}
        return [] if not low else [
            model for model, keys in self._whole.items() if not low.isdisjoint(keys)
        ]  # fmt: skip

    # ---- lookups --------------------------------------------------------------------------------

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
        if self._policy is None:
            return False
        model = self.model_of(w.pointer)
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
        if self._policy is None:
            return None
        model = self.model_of(w.pointer)
        victims = self._policy.admit(model, w.pointer, w.bytes, self._now)
        if victims is None:
            return None
        self._drop_streamed(victims)
        start = self._gap(w.bytes)
        if start is None:  # there is room, but in pieces
            self._policy.drop(w.pointer)
            return None
        entry = self._entries[w.pointer] = self._entry(w, start)
        insort(self._starts, (start, w.pointer))
        self.counts.cached_bytes += w.bytes
        self.bytes += w.bytes
        self._changes += 1
        return entry.handle

    # ---- leaving --------------------------------------------------------------------------------

    def forget(self, model: str) -> None:
        """Drop a detached model: its addresses may come to mean something else."""
        self.release(model)
        if self._policy is not None:
            self._drop_streamed(self._policy.forget(model))
        self._models = [one for one in self._models if one[2] != model]

    def clear(self) -> None:
        """Drop what was cached as it streamed by: some of it may not have been filled after all.
        Whole models stay, because all of a model was there before it was shown."""
        if self._policy is not None:
            for key in list(self._entries):
                self._policy.drop(key)
                self._drop_streamed([key])

    def model_of(self, address: int) -> str:
        """Return the model that has weights at an address of its home. Raises KeyError."""
        at = bisect_right(self._models, address, key=lambda one: one[0]) - 1
        if at >= 0:
            first, size, model = self._models[at]
            if address < first + size:
                return model
        raise KeyError(f"no model has weights at {address:#x}")

    def _entry(self, w: WeightHandle, start: int) -> _Entry:
        memory = self._arena[start : start + w.bytes]
        handle = WeightHandle(memory.data_ptr(), w.shape, w.dtype, "hbm", memory)
        return _Entry(start, start + w.bytes, handle)

    def _gaps(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the free parts above KV, in order."""
        gaps: list[tuple[int, int]] = []
        free_from = self._kv_end
        for start, key in self._starts:
            if start > free_from:
                gaps.append((free_from, start))
            entry = self._entries.get(key) or self._reserved[key]
            free_from = max(free_from, entry.stop)
        if free_from < self._arena.numel():
            gaps.append((free_from, self._arena.numel()))
        return gaps

    def _gap(self, size: int) -> int | None:
        """Return the start of the last gap of `size` bytes."""
        return _take_last(self._gaps(), size)

    def _forget_start(self, start: int, key: int) -> None:
        del self._starts[bisect_left(self._starts, (start, key))]

    def _drop_streamed(self, keys: Iterable[Hashable]) -> None:
        """Drop weights that were cached as they streamed by, of any models."""
        of_model: dict[str, list[int]] = {}
        for key in keys:
            assert isinstance(key, int)
            of_model.setdefault(self.model_of(key), []).append(key)
        for model in sorted(of_model):
            self._drop(model, of_model[model])

    def _drop(self, model: str, keys: Iterable[int]) -> None:
        """Drop visible weights of a model."""
        for key in keys:
            entry = self._entries.pop(key)
            self._forget_start(entry.start, key)
            self.bytes -= entry.stop - entry.start
            self.counts.dropped_bytes += entry.stop - entry.start
            self._changes += 1
        self._on_drop(model)


def _take_last(gaps: list[tuple[int, int]], size: int) -> int | None:
    """Cut `size` bytes off the end of the last of the gaps that has room. Return their start, None
    if no gap has."""
    for at in range(len(gaps) - 1, -1, -1):
        first, stop = gaps[at]
        start = (stop - size) // _ALIGNMENT * _ALIGNMENT
        if start >= first:
            gaps[at] = (first, start)
            return start
    return None
