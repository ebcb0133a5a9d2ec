"""KV between HBM and host memory by copy engines, one stream a direction, beside what computes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from c2cserve.engine.gpu.completion_notifier import Bell
from c2cserve.engine.rotation import Copy
from c2cserve.kernels.gpu.driver import copy_async, new_stream
from c2cserve.memory.pinning import PinnedRegion


class KvCopies:
    """`engine.rotation.Copier` of a slice. Both directions of the link are in use at a time."""

    def __init__(
        self, arena: Tensor, host: Tensor, region: PinnedRegion, computing: torch.cuda.Stream,
        ring: Callable[[], None],
    ) -> None:  # fmt: skip
        """`region`: the registration of `host`, held as long as this is. `ring`: called, from
        another thread, when copies are over; steps have a bell of their own, so that none waits for
        a long copy to be rung."""
        device = arena.device
        assert device.index is not None
        self._arena, self._host, self._region = arena, host, region
        self._computing = computing
        self._streams = {inward: new_stream(device.index) for inward in (False, True)}
        self._bell = Bell(device, ring)

    def __call__(self, copies: Sequence[Copy], *, inward: bool) -> Callable[[], bool]:
        stream = self._streams[inward]
        if inward:
            # Launched steps may still read what was at these places: weights, or who ended.
            stream.wait_stream(self._computing)
        near, far = self._arena.data_ptr(), self._host.data_ptr()
        for place, there, size in copies:
            target, source = near + place, far + there
            if not inward:
                target, source = source, target
            copy_async(target, source, size, stream.cuda_stream)
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        self._bell.after(event)
        return event.query
