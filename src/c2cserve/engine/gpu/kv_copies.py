"""Copies of KV between HBM and host memory by the transfer engine, beside what computes."""

from collections.abc import Callable, Sequence
from itertools import chain
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from c2cserve.core.actions import Direction
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.rotation import HostKv, no_copies
from c2cserve.memory.host_blocks import CopyRun
from c2cserve.memory.pinning import PinnedRegion, pin_array
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import HOST, Column, SegmentColumns
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
        there, here = near + places, far + offsets
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


def joined(runs: Sequence[CopyRun]) -> tuple[Column, Column, Column]:
    """Return offsets in the arena, offsets in host memory, and sizes. Neighbours in both are one
    copy.

    Moves may have thousands of blocks, so that no step here is a call for each of them."""
    runs = [run for run in runs if run.places]
    counts = np.array([len(run.places) for run in runs], np.int64)
    blocks = chain.from_iterable(run.places for run in runs)
    places = np.fromiter(blocks, np.int64, counts.sum())
    sizes = np.repeat(np.array([run.size for run in runs], np.int64), counts)
    # The first block of a run lies at `there`, and each other one behind the one before.
    before = np.cumsum(sizes) - sizes
    skips = np.array([run.there for run in runs], np.int64) - before[np.cumsum(counts) - counts]
    offsets = before + np.repeat(skips, counts)
    if not runs:
        return places, offsets, sizes
    ends = [column[:-1] + sizes[:-1] != column[1:] for column in (places, offsets)]
    starts = np.append(0, np.flatnonzero(ends[0] | ends[1]) + 1)
    return places[starts], offsets[starts], np.add.reduceat(sizes, starts)


def open_host_kv(
    engine: TransferEngine | None, arena: Tensor, size: int, stream: torch.cuda.Stream,
    notify: Callable[[], None],
) -> HostKv:  # fmt: skip
    """Allocate and register host memory for KV. Raises PinningError."""
    if not size:
        return HostKv(0, no_copies)
    assert engine is not None
    memory = make_arena(size)
    region = pin_array(memory.numpy())
    copies = KvCopies(engine, arena, memory, region, stream, notify)
    # Else what is allocated at this address later could not be registered.
    finalize(copies, region.close).atexit = False
    return HostKv(size, copies)
