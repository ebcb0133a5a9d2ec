"""Copies of KV between HBM and host memory by the transfer engine, beside what computes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from c2cserve.core.actions import Direction
from c2cserve.engine.rotation import Copy
from c2cserve.memory.pinning import PinnedRegion
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import HOST, Segment
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

    def __call__(self, copies: Sequence[Copy], direction: Direction) -> Callable[[], bool]:
        near, far = self._arena.data_ptr(), self._host.data_ptr()
        inward = direction == "in"
        runs = joined(copies)
        if inward:
            segments = [Segment(near + to, far + at, n, self._gpu, HOST) for to, at, n in runs]
        else:
            segments = [Segment(far + to, near + at, n, HOST, self._gpu) for at, to, n in runs]
        # Launched steps may still read what was at places that are written: weights, or ended
        # requests. If those of another lane do, this one waits for them (`gpu.lanes.LaneFence`).
        # What goes out is complete: the policy moves blocks of steps that have ended.
        after = self._computing if inward else None
        ticket = self._engine.submit(segments, after, urgency=_URGENCY[direction])
        self._notifiers[inward].watch(ticket)
        return lambda: self._engine.poll(ticket)


def joined(copies: Sequence[Copy]) -> list[Copy]:
    """Return copies with neighbours as one: blocks of a request often follow one another."""
    runs: list[Copy] = []
    first = there = size = 0
    for near, far, more in copies:
        if near == first + size and far == there + size:
            size += more
            continue
        if size:
            runs.append((first, there, size))
        first, there, size = near, far, more
    if size:
        runs.append((first, there, size))
    return runs
