"""A step's index tensors on their way to the GPU: packed into pinned memory, moved by one copy.

    int32   block_table . slots . logit_rows . | ids . positions . q_start . context_len .
            int64: two words each              | each begins at a multiple of 16 bytes

A kernel moves them, not a copy engine: those are busy with weights while models are loaded.
"""

from dataclasses import replace

import torch
from torch import Tensor

from c2cserve.engine.models.decoder import ForwardBatch
from c2cserve.kernels.gpu.small_copies import copy_small

_WIDE = ("block_table", "slots", "logit_rows")
_NARROW = ("ids", "positions", "q_start", "context_len")
_ALIGNMENT = 16
"""Kernels are compiled for pointers with this alignment."""
_BUFFERS = 2


class Packing:
    """Where the tensors of one batch lie in a tensor of int32 words."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._wide: list[Tensor] = [getattr(batch, name) for name in _WIDE]
        self._narrow: list[Tensor] = [getattr(batch, name) for name in _NARROW]
        self._wide_sizes = _with_gaps(self._wide, _ALIGNMENT // 8)
        self._narrow_sizes = _with_gaps(self._narrow, _ALIGNMENT // 4)
        self._wide_words = 2 * sum(self._wide_sizes)
        self.words = self._wide_words + sum(self._narrow_sizes)

    def fill(self, memory: Tensor) -> None:
        """Write the tensors into `memory` int32 [words] on the host."""
        # numpy copies here: torch would start all of its threads for the tables of a hundred
        # sequences, which takes longer than copying.
        packed = memory.numpy()
        at = 0
        wide = packed[: self._wide_words].view("int64")
        for tensor, size in zip(self._wide, self._wide_sizes[::2], strict=True):
            wide[at : at + size] = tensor.numpy().reshape(-1)
            at += -(-size // 2) * 2
        at = self._wide_words
        for tensor, size in zip(self._narrow, self._narrow_sizes[::2], strict=True):
            packed[at : at + size] = tensor.numpy()
            at += -(-size // 4) * 4

    def unpack(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of `memory` int32 [words], by their names in a batch."""
        wide = memory[: self._wide_words].view(torch.int64).split(self._wide_sizes)[::2]
        narrow = memory[self._wide_words :].split(self._narrow_sizes)[::2]
        names: tuple[str, ...] = (*_WIDE, *_NARROW)
        found: dict[str, Tensor] = dict(zip(names, (*wide, *narrow), strict=True))
        found["block_table"] = found["block_table"].view(self._wide[0].shape)
        return found


def _with_gaps(tensors: list[Tensor], unit: int) -> list[int]:
    """Return the size of each tensor, and that of the gap behind it: the next one begins at a
    multiple of `unit` elements."""
    sizes: list[int] = []
    for tensor in tensors:
        size = tensor.numel()
        sizes += (size, -size % unit)
    return sizes


class _Buffer:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.int32)
        self.copied = torch.cuda.Event()

    def hold(self, words: int) -> Tensor:
        """Return so many words, after waiting for the last copy out of them."""
        self.copied.synchronize()
        if self.memory.shape[0] < words:
            self.memory = torch.empty(2 * words, dtype=torch.int32, pin_memory=True)
        return self.memory[:words]


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
        packing = Packing(batch)
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self._buffers[self._turn]
        pinned = buffer.hold(packing.words)
        packing.fill(pinned)
        moved = torch.empty(packing.words, dtype=torch.int32, device=self._device)
        copy_small(pinned, moved)
        buffer.copied.record()
        return replace(batch, **packing.unpack(moved), host=batch)
