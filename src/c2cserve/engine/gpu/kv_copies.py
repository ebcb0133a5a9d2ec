"""Copies of KV between HBM and host memory by the transfer engine, beside what computes."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from c2cserve.core.actions import Direction
from c2cserve.memory.host_blocks import CopyRun
from c2cserve.memory.pinning import PinnedRegion
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import HOST, SegmentColumns
from c2cserve.transfer.notifier import TicketNotifier
from c2cserve.transfer.settings import Urgency

_URGENCY: dict[Direction, Urgency] = {
    "in": Urgency.TOKEN, "out": Urgency.TOKEN, "copy": Urgency.KV,
}  # fmt: skip
"""What leaves makes room for a request that waits. What is only copied may be needed later."""


class KvCopies:
    """The `engine.rotation.Copier` of a GPU slice. Both directions of the link work at a time."""

    def __init__(
        self, engine: TransferEngine, arena: Tensor, host: Tensor, region: PinnedRegion,
        computing: torch.cuda.Stream, notify: Callable[[], None],
    ) -> None:  # fmt: skip
        """`region` is the registration of `host`; it is held as long as this object is.

        `notify` is called from another thread when copies are over. Each direction has a notifier:
        notice of one must not wait for long copies of the other.
        """
        assert arena.device.index is not None
        self._engine = engine
        self._gpu: int = arena.device.index
        self._arena, self._host, self._region = arena, host, region
        self._computing = computing
        self._notifiers = {inward: TicketNotifier(engine, notify) for inward in (False, True)}

    def __call__(self, copies: Sequence[CopyRun], direction: Direction) -> Callable[[], bool]:
        near, far = self._arena.data_ptr(), self._host.data_ptr()
        inward = direction == "in"
        places, offsets, sizes = joined(copies)
        there = [near + place for place in places]
        here = [far + offset for offset in offsets]
        if inward:
            columns = SegmentColumns(there, here, sizes, self._gpu, HOST)
        else:
            columns = SegmentColumns(here, there, sizes, HOST, self._gpu)
        # Launched steps may still read what was at places that are written: weights, or ended
        # requests. If those of another lane do, this one waits for them (`gpu.lanes.LaneFence`).
        # What goes out is complete: the policy moves blocks of steps that have ended.
        after = self._computing if inward else None
        ticket = self._engine.submit(columns.packed(), after, urgency=_URGENCY[direction])
        self._notifiers[inward].watch(ticket)
        return lambda: self._engine.poll(ticket)


def joined(runs: Sequence[CopyRun]) -> tuple[list[int], list[int], list[int]]:
    """Return offsets in the arena, offsets in host memory, and sizes. Neighbours in both are one
    copy.

    Moves may have thousands of blocks, so no step here is a call for each."""
    places: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for blocks, there, size in runs:
        starts = [0]
        starts += [at for at, (a, b) in enumerate(pairwise(blocks), 1) if b - a != size]
        places += [blocks[at] for at in starts]
        offsets += [there + at * size for at in starts]
        starts.append(len(blocks))
        sizes += [(stop - start) * size for start, stop in pairwise(starts)]
    return places, offsets, sizes
