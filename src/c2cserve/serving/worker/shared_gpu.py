"""What all slices of a GPU share in the process that computes for them."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.gradual_pinning import Pinner
from c2cserve.policy.weights.hbm_residency import Residency
from c2cserve.policy.weights.lending import Lending
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.worker.gpu_relays import GpuRelays
from c2cserve.serving.worker.hybrid_steps import LinkUse
from c2cserve.serving.worker.transfer_stats import with_transfers

if TYPE_CHECKING:
    from c2cserve.devices.partitions import Partition
    from c2cserve.engine.gpu.segments import PinnedSegments
    from c2cserve.engine.gpu.setup import GpuParts
    from c2cserve.memory.peer_pool import PeerPool
    from c2cserve.transfer.engine import LinkCounts, TransferEngine
    from c2cserve.transfer.moves import Port


_COUNT_S = 0.1
"""How old the counts of transfers in the table may be: it is made after every tick."""


class NoEngine(Exception):
    """The slice cannot compute here; the message is one line with the reason and what helps."""


class SharedGpu:
    """Resources of a GPU that exist once per process, for all its slices there. Thread-safe."""

    def __init__(self, share: GpuShare) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._device: int | None = None
        self._partitions: list[Partition] = []
        self._segments: PinnedSegments | None = None
        self._peers: PeerPool | None = None
        self._transfers: TransferEngine | None = None
        self._relays: GpuRelays | None = None
        self._over_link: set[str] = set()
        """Slices whose steps in flight read weights over the link."""
        self._counting: str | None = None
        """The slice whose table has the process's transfers: the first one."""
        self._counted_s = 0.0
        self._counts: list[tuple[Port, LinkCounts]] = []
        self.streaming: set[str] = set()
        """Slices that have steps in flight: they share the link."""
        self.link_use = LinkUse()

    @property
    def segments(self) -> "PinnedSegments":
        assert self._segments is not None, "no slice has opened the GPU"
        return self._segments

    def with_transfers(self, stats: SliceStats, slice_id: str) -> SliceStats:
        """Return a slice's table with what the process's transfer engine counts, if that is its."""
        if self._transfers is None or self._device is None or slice_id != self._counting:
            return stats
        now = time.monotonic()
        if now - self._counted_s > _COUNT_S:
            self._counted_s, self._counts = now, self._transfers.port_counts()
        return with_transfers(stats, self._device, self._counts)

    def open(
        self, slice_: Slice, share: GpuShare, sampler: CpuOps, notify: Callable[[], None],
        hybrid_alpha: float | None = None,
    ) -> "GpuParts":  # fmt: skip
        """Open one slice's parts of the GPU for the calling thread. `hybrid_alpha`: see `open_gpu`.
        Raises `NoEngine`."""
        # Triton and the CUDA bindings come with the `gpu` extra: a CPU slice does without.
        from c2cserve.devices.binding import BindingError, bind, find_device
        from c2cserve.devices.partitions import PartitionError, split_sms
        from c2cserve.engine.gpu.setup import SETUP_ERRORS, open_gpu
        from c2cserve.transfer.gpus import engine_of

        with self._lock:
            try:
                if self._device is None:
                    self._counting = slice_.id
                    self._device = bind(self._share)
                    lenders = [find_device(uuid) for uuid in self._share.lenders]
                    neighbours = {uuid: find_device(uuid) for uuid in self._share.neighbours}
                    self._transfers = engine_of(
                        (self._device, *lenders), tuple(neighbours.values()), share.profile
                    )
                    self._peers = self._borrow(self._transfers, self._device, lenders)
                    self._segments = self._open_segments(self._transfers, neighbours)
                if share.parts and not self._partitions:
                    self._partitions = split_sms(self._device, share.sms, share.parts)
                partition = self._partitions[share.part] if share.parts else None
                swaps = slice_.swaps_weights
                parts = open_gpu(
                    self._device, slice_.kv_bytes, sampler.sample, partition=partition,
                    profile=share.profile, notify=notify, swaps_weights=swaps,
                    cache_policy=None if swaps else Residency(slice_.kv_bytes),
                    peers=self._peers, transfers=self._transfers,
                    host_kv_bytes=slice_.host_kv_bytes, lanes=slice_.lanes,
                    hybrid_alpha=hybrid_alpha,
                )  # fmt: skip
            except (BindingError, PartitionError, *SETUP_ERRORS) as error:
                raise NoEngine(str(error)) from error
            if self._relays is not None:
                self._relays.add_arena(parts.arena.data_ptr(), parts.arena.numel())
            return parts

    def note_steps(self, slice_id: str, *, over_link: bool) -> None:
        """Note whether a slice's steps in flight read weights over the link."""
        if self._relays is None or (slice_id in self._over_link) == over_link:
            return
        with self._lock:
            (self._over_link.add if over_link else self._over_link.discard)(slice_id)
            self._relays.set_streaming(bool(self._over_link))

    def _open_segments(
        self, transfers: "TransferEngine", neighbours: Mapping[str, int]
    ) -> "PinnedSegments":
        from c2cserve.engine.gpu.segments import PinnedSegments

        assert self._device is not None
        pinner = Pinner(computes=lambda: bool(self.streaming), device=self._device)
        if not neighbours:
            return PinnedSegments(pinner, self._peers)
        server = os.getppid()
        self._relays = GpuRelays(
            transfers, self._device, lambda uuid: f"c2cserve.{server}.relays.{uuid}",
            self._share.uuid, neighbours,
        )  # fmt: skip
        segments = PinnedSegments(pinner, self._peers, self._relays.neighbours)
        self._relays.serve(segments)
        return segments

    def _borrow(
        self, transfers: "TransferEngine", device: int, lenders: Sequence[int]
    ) -> "PeerPool | None":
        """Open the memory that other GPUs lend; None if none does."""
        from c2cserve.engine.gpu.peers import open_peers

        if not lenders:
            return None
        lent_bytes = self._share.lent_bytes
        lending = Lending(lent_bytes * len(lenders))
        return open_peers(transfers, device, lenders, lent_bytes, lending)
