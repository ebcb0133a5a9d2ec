"""Weights kept in a slice's HBM as they stream by ("tee").

What stays is decided elsewhere (`Keeper`, in the product `policy.residency`); this holds the
memory. A weight that is let go may still be read by work that is enqueued: torch's allocator hands
its memory on in stream order, so nothing waits.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from c2cserve.kernels.gpu.lane import Lane
from c2cserve.kernels.gpu.weight import TORCH_DTYPES, WeightHandle


class Keeper(Protocol):
    """Decides what stays. Keys are addresses of weights at home."""

    def used(self, model: str, now: float, priority: int = 0) -> None: ...

    def admit(self, model: str, key: Hashable, size: int, now: float) -> list[Hashable] | None: ...

    def shrink(self, budget_bytes: int) -> list[Hashable]: ...

    def forget(self, model: str) -> list[Hashable]: ...


@dataclass(slots=True)
class CacheCounts:
    """Bytes, since the start: for `/metrics`."""

    hit_bytes: int = 0
    """Read from HBM that would have crossed the link."""
    streamed_bytes: int = 0
    """That crossed the link."""
    kept_bytes: int = 0
    dropped_bytes: int = 0


class HbmCache:
    """`kernels.gpu.linear.Kept`. One per lane; not thread-safe, as a lane is not."""

    def __init__(self, lane: Lane, keeper: Keeper) -> None:
        self._lane = lane
        self._keeper = keeper
        self._kept: dict[int, Tensor] = {}
        self._model, self._now = "", 0.0
        self.counts = CacheCounts()

    def begin_step(self, model: str, now: float, priority: int = 0) -> None:
        """The weights asked for from here on are this model's."""
        self._model, self._now = model, now
        self._keeper.used(model, now, priority)

    def find(self, w: WeightHandle) -> Tensor | None:
        """W [N, K] in HBM, if it is there."""
        found = self._kept.get(w.pointer)
        if found is None:
            self.counts.streamed_bytes += w.bytes
        else:
            self.counts.hit_bytes += w.bytes
        return found

    def place(self, w: WeightHandle) -> Tensor | None:
        """Memory to bring W into, from where it will be found from now on; None: it is not to be
        kept. The caller fills it, on the lane's streams, before it does anything else."""
        gone = self._keeper.admit(self._model, w.pointer, w.bytes, self._now)
        if gone is None:
            return None
        self._drop(gone)
        place = torch.empty(
            w.shape, dtype=TORCH_DTYPES[w.dtype], device=f"cuda:{self._lane.device}"
        )
        place.record_stream(self._lane.copies)
        self._kept[w.pointer] = place
        self.counts.kept_bytes += w.bytes
        return place

    def shrink(self, budget_bytes: int) -> None:
        """KV takes room, or gives it back."""
        self._drop(self._keeper.shrink(budget_bytes))

    def forget(self, model: str) -> None:
        """The model was detached: its addresses may come to mean something else."""
        self._drop(self._keeper.forget(model))

    @property
    def bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    def _drop(self, keys: list[Hashable]) -> None:
        for key in keys:
            assert isinstance(key, int)
            self.counts.dropped_bytes += self._kept.pop(key).nbytes
