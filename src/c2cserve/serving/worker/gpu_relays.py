"""Links that workers of different GPUs lend each other, for what one worker's slices load."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from c2cserve.transfer.moves import Port
from c2cserve.transfer.relay_channel import GpuMemory
from c2cserve.transfer.relay_host import RelayHost
from c2cserve.transfer.relay_neighbours import RelayNeighbours

if TYPE_CHECKING:
    from c2cserve.engine.gpu.segments import PinnedSegments
    from c2cserve.transfer.engine import TransferEngine

log = logging.getLogger(__name__)


class NeighbourMemory:
    """A `transfer.relay_host.RelayMemory`: segments as this worker's slices map them, and memory of
    other workers' GPUs."""

    def __init__(self, device: int, segments: "PinnedSegments") -> None:
        self._device = device
        self._segments = segments
        self._bases: dict[int, int] = {}

    def open_segment(self, path: str) -> int:
        return self._segments.open(Path(path), lent=True).data.ctypes.data

    def close_segment(self, path: str) -> None:
        self._segments.close(Path(path), lent=True)

    def open_gpu(self, memory: GpuMemory) -> int:
        from c2cserve.transfer.gpus import import_memory

        base = import_memory(self._device, memory)
        self._bases[base + memory.offset] = base
        return base + memory.offset

    def close_gpu(self, address: int) -> None:
        from c2cserve.transfer.gpus import forget_memory

        forget_memory(self._device, self._bases.pop(address))


class GpuRelays:
    """The relays of one GPU's process, in both roles."""

    def __init__(
        self, engine: "TransferEngine", device: int, name_of: Callable[[str], str], uuid: str,
        neighbours: Mapping[str, int],
    ) -> None:  # fmt: skip
        """`neighbours` are CUDA's numbers of other workers' GPUs, by the driver's names. `name_of`
        makes the name of a GPU's worker out of such a name."""
        self._engine = engine
        self._device = device
        self._name = name_of(uuid)
        self.neighbours = RelayNeighbours(
            engine, {Port(gpu, "in"): name_of(other) for other, gpu in neighbours.items()}
        )
        self._host: RelayHost | None = None

    def serve(self, segments: "PinnedSegments") -> None:
        """Relay for the neighbours from now on. A failure is one line of the log."""
        from c2cserve.transfer.gpus import serve_relays

        try:
            self._host = RelayHost(
                self._name, lambda channel: serve_relays(self._engine, self._device, channel),
                NeighbourMemory(self._device, segments),
            )  # fmt: skip
        except OSError as fault:  # another process has the name
            log.warning("this GPU relays for no other: %s", fault)

    def add_arena(self, address: int, size: int) -> None:
        """Let neighbours write to a slice's arena. Memory that cannot be shared is one line of the
        log: its bytes take the GPU's own link."""
        from c2cserve.kernels.gpu.driver import CudaError
        from c2cserve.transfer.gpus import export_memory

        try:
            memory = export_memory(address, size)
        except CudaError as fault:
            log.warning("neighbours cannot relay for this GPU: %s", fault)
            return
        self.neighbours.add_gpu(address, memory)

    def set_streaming(self, streams: bool) -> None:
        """Note whether steps read weights over this GPU's link: they come before relays."""
        if self._host is not None:
            self._host.set_streaming(streams)
