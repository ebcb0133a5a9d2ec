"""A step's index tensors on their way to the GPU: packed into pinned memory, moved by one copy."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from c2cserve.engine.models.decoder import ForwardBatch

_FIELDS = ("ids", "positions", "q_start", "context_len", "block_table", "slots", "logit_rows")
_ALIGNMENT = 16
"""Kernels are compiled for pointers with this alignment."""
_BUFFERS = 2


class _Buffer:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()

    def hold(self, size: int) -> Tensor:
        """Return at least `size` bytes, after waiting for the last copy out of them."""
        self.copied.synchronize()
        if self.memory.shape[0] < size:
            self.memory = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self.memory[:size]


class Staging:
    """The `to_device` of an executor. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self.renew()

    def renew(self) -> None:
        """Make new buffers after a failed step. Nothing is copied meanwhile."""
        self._buffers = [_Buffer() for _ in range(_BUFFERS)]

    def __call__(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with its tensors on the GPU, in the order of the current stream."""
        tensors: dict[str, Tensor] = {name: getattr(batch, name) for name in _FIELDS}
        offsets: list[int] = []
        size = 0
        for tensor in tensors.values():
            offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self._buffers[self._turn]
        host = buffer.hold(size)
        # numpy copies here: torch would start all of its threads for the tables of a hundred
        # sequences, which takes longer than copying.
        packed = host.numpy()
        for tensor, offset in zip(tensors.values(), offsets, strict=True):
            packed[offset : offset + tensor.nbytes] = _bytes(tensor)
        moved_bytes = host.to(self._device, non_blocking=True)
        buffer.copied.record()
        moved = {
            name: moved_bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
        }
        return replace(batch, **moved, host=batch)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of the tensor's elements, in order."""
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
