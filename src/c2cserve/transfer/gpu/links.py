"""The links of this process's GPUs: `transfer.engine.Links` on the driver's API.

    in0 direct    copy engine of GPU 0        host ──PCIe 0──▶ GPU 0
    in0 by in1    relay kernel on GPU 1       host ──PCIe 1──▶ GPU 1's SMs ──NVLink──▶ GPU 0
    out0 by out1  relay kernel on GPU 1       GPU 0 ──NVLink──▶ GPU 1's SMs ──PCIe 1──▶ host

A relay has to be a kernel. A copy between host memory and GPU 0 takes GPU 0's own link, also when
it is issued on another GPU's stream. Each slot of a link has a stream of its own. So a micro-task
begins while the one before ends.
"""

import threading
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

import torch

from c2cserve.kernels.gpu.driver import (
    CudaError,
    call_on_host,
    checked,
    cu,
    new_stream,
    wait_at_least,
)
from c2cserve.transfer.engine import LinkError, TransferEngine
from c2cserve.transfer.gpu.contexts import context_of, use
from c2cserve.transfer.gpu.flags import Flags, Holds
from c2cserve.transfer.gpu.relay import PIECES_MAX, Relay
from c2cserve.transfer.gpu.slots import RelaySlot, Slot, copy_pieces
from c2cserve.transfer.moves import HOST, Piece, Port, Segment
from c2cserve.transfer.schedule import Outstanding
from c2cserve.transfer.settings import Settings
from c2cserve.transfer.wake import Wake

CTAS = 4
"""CTAs of a relay kernel: as few as fill a PCIe 5 link."""
_HOLDS = 256
"""Streams that can be held at a time."""
_HOST_MEMORY = 1
"""CU_MEMORYTYPE_HOST"""
_ENABLED_ALREADY = 704
"""CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, which leaves nothing behind in the driver's API."""


class GpuLinks:
    """The links of some of the process's GPUs, by CUDA's numbers.

    Raises `CudaError`, and `KernelMissingError` if there are neighbours and the relay kernel is not
    built. GPUs without access to each other's memory do not relay for each other.
    """

    def __init__(
        self, gpus: Sequence[int], *, depth: int = 2, ctas: int = CTAS, folder: Path | None = None
    ) -> None:
        """`depth` is that of the engine's settings. `ctas` are those of a relay kernel."""
        self._gpus = tuple(gpus)
        self.wake = Wake()
        self.pieces_max = PIECES_MAX
        pairs = [pair for pair in permutations(gpus, 2) if _enable_peer(*pair)]
        self.relays: Mapping[Port, Sequence[Port]] = _relays(gpus, pairs)
        self._lock = threading.Lock()
        with use(gpus[0]):
            self._flags = Flags(4 * len(gpus) * depth)
            self._hold_flags = Flags(_HOLDS)
        self._holds = Holds(self._hold_flags, _HOLDS)
        self._slots: dict[tuple[Port, int], Slot] = {}
        self._relay_slots: dict[tuple[Port, int], RelaySlot] = {}
        relay = Relay(folder) if pairs else None
        for port, others in self.relays.items():
            gpu = _gpu_of(port)
            for slot in range(depth):
                self._slots[port, slot] = Slot(gpu, self.wake)
                if others and relay is not None:
                    number = 2 * len(self._relay_slots)
                    made = RelaySlot(gpu, self.wake, relay, ctas, self._flags, number)
                    self._relay_slots[port, depth + slot] = made
        for made in (*self._slots.values(), *self._relay_slots.values()):
            with use(made.gpu):
                made.warm()
        self._side = {port: new_stream(_gpu_of(port)) for port in self.relays}
        """Streams for single copies that hold no stream."""

    # ---- micro-tasks, on the engine's thread ----------------------------------------------------

    def start(self, one: Outstanding) -> None:
        slot = self._slot(one)
        try:
            checked("cuCtxSetCurrent", cu.cuCtxSetCurrent(slot.context))
            slot.copy(one.task.pieces)
        except CudaError as fault:
            raise LinkError(str(fault)) from fault

    def is_over(self, one: Outstanding) -> bool:
        try:
            return self._slot(one).is_over()
        except CudaError as fault:
            if one.relayed:
                self.recall(one)  # its bytes are sent again, and it may still run
            raise LinkError(str(fault)) from fault

    def recall(self, one: Outstanding) -> None:
        self._relay_slots[one.port, one.slot].recall()

    def is_harmless(self, one: Outstanding) -> bool:
        return not self._relay_slots[one.port, one.slot].has_begun

    def _slot(self, one: Outstanding) -> Slot:
        slots = self._relay_slots if one.relayed else self._slots
        return slots[one.port, one.slot]

    def check(self, segments: Sequence[Segment]) -> None:
        ends: list[tuple[int, int]] = []
        for one in segments:
            if HOST in (one.target_gpu, one.source_gpu) and one.size:
                start = one.target if one.target_gpu == HOST else one.source
                ends.append((start, start + one.size - 1))
        if not ends:
            return
        kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        with use(self._gpus[0]):
            for address in (min(start for start, _ in ends), max(last for _, last in ends)):
                code, *found = cu.cuPointerGetAttribute(kind, address)
                if int(code) != 0 or int(found[0]) != _HOST_MEMORY:
                    raise ValueError(f"host memory at {address:#x} is not pinned")

    # ---- streams, on callers' threads -----------------------------------------------------------

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        if not event.query():
            try:
                with use(stream.device.index):
                    call_on_host(stream.cuda_stream, self.wake.function, self.wake.semaphore)
            except CudaError as fault:
                raise LinkError(str(fault)) from fault
        return event

    def hold(self, stream: torch.cuda.Stream) -> int:
        try:
            with self._lock, use(stream.device.index):
                number, flag, value = self._holds.take()
                try:
                    wait_at_least(stream.cuda_stream, flag, value)
                except CudaError:
                    self._holds.let_go(number)
                    raise
        except CudaError as fault:
            raise LinkError(str(fault)) from fault
        return number

    def let_go(self, number: int) -> None:
        with self._lock:
            self._holds.let_go(number)

    def copy(
        self, segments: Sequence[Segment], stream: torch.cuda.Stream | None, *, hold: bool
    ) -> torch.cuda.Event:
        pieces = [Piece(one.target, one.source, one.size) for one in segments if one.size]
        carrier = self._side[segments[0].port if segments else next(iter(self._side))]
        if stream is not None:
            if hold:
                carrier = stream
            else:
                carrier.wait_stream(stream)
        try:
            with use(carrier.device.index):
                for start in range(0, len(pieces), _BATCH):
                    copy_pieces(pieces[start : start + _BATCH], cu.CUstream(carrier.cuda_stream))
        except CudaError as fault:
            raise LinkError(str(fault)) from fault
        event = torch.cuda.Event(blocking=True)
        event.record(carrier)
        return event

    def close(self) -> None:
        """Free what the driver has for the links. Nothing is under way. Raises `CudaError`."""
        for stream in self._side.values():
            stream.synchronize()
        for slot in [*self._slots.values(), *self._relay_slots.values()]:
            slot.close()
        self._flags.close()
        self._hold_flags.close()


_BATCH = 1024
"""Copies of one call."""


def open_engine(
    gpus: Sequence[int], settings: Settings | None = None, *, ctas: int = CTAS,
    folder: Path | None = None,
) -> TransferEngine[torch.cuda.Stream]:  # fmt: skip
    """Return an engine over the links of these GPUs. Raises as `GpuLinks` does."""
    settings = settings or Settings()
    links = GpuLinks(gpus, depth=settings.depth, ctas=ctas, folder=folder)
    return TransferEngine(links, settings)


def _gpu_of(port: Port) -> int:
    """Return the GPU whose streams carry what takes the port: peers' bytes are pushed."""
    return port.source if port.direction == "peer" else port.gpu


def _relays(gpus: Sequence[int], pairs: Sequence[tuple[int, int]]) -> dict[Port, list[Port]]:
    """Return all ports with what they can relay for.

    `pairs` are (GPU, another one whose memory it has access to).
    """
    relays: dict[Port, list[Port]] = {}
    for gpu in gpus:
        others = [other for one, other in pairs if one == gpu]
        relays[Port(gpu, "in")] = [Port(other, "in") for other in others]
        relays[Port(gpu, "out")] = [Port(other, "out") for other in others]
        for other in (gpu, *others):
            relays[Port(other, "peer", gpu)] = []
    return relays


def _enable_peer(gpu: int, other: int) -> bool:
    """Let `gpu` access the memory of `other`. Return False if it cannot. Raises `CudaError`."""
    theirs = context_of(other)
    with use(gpu):
        devices = [checked("cuDeviceGet", cu.cuDeviceGet(number)) for number in (gpu, other)]
        if not checked("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(*devices)):
            return False
        result = cu.cuCtxEnablePeerAccess(theirs, 0)
        if int(result[0]) != _ENABLED_ALREADY:
            checked("cuCtxEnablePeerAccess", result)
    return True
