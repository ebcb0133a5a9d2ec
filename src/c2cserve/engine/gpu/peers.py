"""Memory that neighbouring GPUs lend to a GPU's slices, and what of a segment goes there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2cserve.core.tensors import ITEM_BYTES
from c2cserve.engine.gpu.arena import gpu_arena
from c2cserve.engine.models.layout import EMBED, HEAD
from c2cserve.kernels.gpu import driver
from c2cserve.memory.peer_pool import Lendable, Lender, PeerPool
from c2cserve.memory.segment import Segment, State, TensorPlace

PIECE_BYTES = 256 << 20
"""Of weights that are copied, and go, together; a larger tensor goes alone."""


@dataclass(frozen=True, slots=True)
class _Lent:
    """`memory.peer_pool.Neighbour`: copies use the neighbour's own link to the host."""

    memory: Tensor
    stream: torch.cuda.Stream

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def size(self) -> int:
        return self.memory.numel()

    def copy(self, target: int, source: int, size: int) -> None:
        torch.cuda.set_device(self.memory.device)  # of the thread that copies
        driver.copy_async(target, source, size, self.stream.cuda_stream)
        done = torch.cuda.Event(blocking=True)
        done.record(self.stream)
        done.synchronize()


def open_peers(
    device: int, lenders: Sequence[int], lent_bytes: int, lender: Lender
) -> PeerPool:  # fmt: skip
    """Take `lent_bytes` of each of the GPUs `lenders` for what runs on `device`.

    Raises `CudaError` without peer access, `GpuMemoryError` without room.
    """
    neighbours: list[_Lent] = []
    for other in lenders:
        driver.enable_peer(device, other)
        memory = gpu_arena(torch.device("cuda", other), lent_bytes, "--gpu-peer-bytes")
        neighbours.append(_Lent(memory, driver.new_stream(other)))
    torch.cuda.set_device(device)
    return PeerPool(neighbours, lender)


def lendable(segment: Segment) -> Lendable:
    """All tensors that GEMMs read. An embedding table of its own is not: a step reads a few rows
    of it, out of host memory."""

    def complete() -> bool:
        return segment.state is State.READY

    skipped = EMBED if HEAD in segment.tensors else ""
    places = [place for name, place in segment.tensors.items() if name != skipped]
    return Lendable(segment.data.ctypes.data, tuple(_pieces(places)), complete)


def _pieces(places: Sequence[TensorPlace]) -> list[tuple[int, int]]:
    """Tensors that follow each other, in runs of up to `PIECE_BYTES`."""
    pieces: list[tuple[int, int]] = []
    for place in sorted(places, key=lambda one: one.offset):
        stop = place.offset + _bytes(place)
        if pieces and stop - pieces[-1][0] <= PIECE_BYTES:
            pieces[-1] = (pieces[-1][0], stop)
        else:
            pieces.append((place.offset, stop))
    return pieces


def _bytes(place: TensorPlace) -> int:
    return ITEM_BYTES[place.dtype] * torch.Size(place.shape).numel()
