"""Memory that neighbouring GPUs lend to a GPU's slices, and the weights that are copied there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2cserve.core.tensors import ITEM_BYTES
from c2cserve.engine.gpu.arena import gpu_arena
from c2cserve.engine.models.layout import EMBED, HEAD
from c2cserve.kernels.gpu import driver
from c2cserve.memory import segment as pool
from c2cserve.memory.peer_pool import Lendable, Lender, PeerPool
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import HOST, Segment
from c2cserve.transfer.settings import Urgency

PIECE_BYTES = 256 << 20
"""Weights are copied and dropped in pieces of this size; a larger tensor is a piece of its own."""


@dataclass(frozen=True, slots=True)
class _Lent:
    """A `memory.peer_pool.Neighbour`. Copies use the neighbour's own link to the host."""

    memory: Tensor
    engine: TransferEngine

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def size(self) -> int:
        return self.memory.numel()

    @property
    def gpu(self) -> int:
        assert self.memory.device.index is not None
        return self.memory.device.index

    def copy(self, target: int, source: int, size: int) -> None:
        segment = Segment(target, source, size, self.gpu, HOST)
        self.engine.wait(self.engine.submit([segment], urgency=Urgency.LENDING), spins=False)


def open_peers(
    engine: TransferEngine, device: int, lenders: Sequence[int], lent_bytes: int, lender: Lender
) -> PeerPool:
    """Allocate `lent_bytes` on each of the GPUs `lenders` for what runs on `device`. `engine` has
    the links of all of them.

    Raises `CudaError` without peer access, `GpuMemoryError` without room.
    """
    neighbours: list[_Lent] = []
    for other in lenders:
        driver.enable_peer(device, other)
        memory = gpu_arena(torch.device("cuda", other), lent_bytes, "--gpu-peer-bytes")
        neighbours.append(_Lent(memory, engine))
    torch.cuda.set_device(device)
    return PeerPool(neighbours, lender)


def lendable(segment: pool.Segment, registered: Callable[[], bool]) -> Lendable:
    """Return all tensors that GEMMs read. An embedding table that is not the head is left out: a
    step reads only a few rows of it, from host memory. `registered` tells whether copy engines can
    read all of the segment."""

    def complete() -> bool:
        return segment.state is pool.State.READY and registered()

    skipped = EMBED if HEAD in segment.tensors else ""
    places = [place for name, place in segment.tensors.items() if name != skipped]
    return Lendable(segment.data.ctypes.data, tuple(_pieces(places)), complete)


def _pieces(places: Sequence[pool.TensorPlace]) -> list[tuple[int, int]]:
    """Group tensors that follow each other into runs of up to `PIECE_BYTES`."""
    pieces: list[tuple[int, int]] = []
    for place in sorted(places, key=lambda one: one.offset):
        stop = place.offset + _bytes(place)
        if pieces and stop - pieces[-1][0] <= PIECE_BYTES:
            pieces[-1] = (pieces[-1][0], stop)
        else:
            pieces.append((place.offset, stop))
    return pieces


def _bytes(place: pool.TensorPlace) -> int:
    return ITEM_BYTES[place.dtype] * torch.Size(place.shape).numel()
