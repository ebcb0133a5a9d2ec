"""Copies of KV between HBM and host memory by copy engines, beside what computes.

Each direction of the link has a stream of its own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from c2cserve.engine.gpu.completion_notifier import CompletionNotifier
from c2cserve.engine.rotation import Copy
from c2cserve.kernels.gpu.driver import copy_async, new_stream
from c2cserve.memory.pinning import PinnedRegion


class KvCopies:
    """The `engine.rotation.Copier` of a GPU slice. Both directions of the link work at a time."""

    def __init__(
        self, arena: Tensor, host: Tensor, region: PinnedRegion, computing: torch.cuda.Stream,
        notify: Callable[[], None],
    ) -> None:  # fmt: skip
        """`region` is the registration of `host`; it is held as long as this object is.

        `notify` is called from another thread when copies are over. Steps have a notifier of their
        own: notice of a step must not wait for a long copy.
        """
        device = arena.device
        assert device.index is not None
        self._arena, self._host, self._region = arena, host, region
        self._computing = computing
        self._streams = {inward: new_stream(device.index) for inward in (False, True)}
        self._notifier = CompletionNotifier(device, notify)

    def __call__(self, copies: Sequence[Copy], *, inward: bool) -> Callable[[], bool]:
        stream = self._streams[inward]
        if inward:
            # Launched steps may still read what was at these places: weights, or ended requests.
            # If those of another lane do, this one waits for them (`engine.gpu.lanes.LaneFence`).
            stream.wait_stream(self._computing)
        near, far = self._arena.data_ptr(), self._host.data_ptr()
        for arena_offset, host_offset, size in copies:
            target, source = near + arena_offset, far + host_offset
            if not inward:
                target, source = source, target
            copy_async(target, source, size, stream.cuda_stream)
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        self._notifier.watch(event)
        return event.query
