"""The setting up of a GPU slice: stream, kernels, dataflows, KV arena, operators.

Everything that can fail or take long is done here, before the slice reports that it is up.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from c2cserve.core.events import ChunkCost
from c2cserve.core.machine import ProfileChoice
from c2cserve.core.step import LANES
from c2cserve.core.tensors import HalfDtype
from c2cserve.devices.partitions import Partition
from c2cserve.engine.chunk_costs import chunk_costs
from c2cserve.engine.gpu.arena import GpuMemoryError, gpu_arena
from c2cserve.engine.gpu.graphs import DecodeGraphs
from c2cserve.engine.gpu.kv_copies import open_host_kv
from c2cserve.engine.gpu.lanes import GpuLane, LaneFence, lane_contexts, lane_streams, marker
from c2cserve.engine.gpu.layers import shapes_of
from c2cserve.engine.gpu.load_transfers import LoadTransfers
from c2cserve.engine.gpu.ops import GpuOps
from c2cserve.engine.gpu.sampling import HostSampler
from c2cserve.engine.gpu.staging import Staging
from c2cserve.engine.gpu.step_timer import EventTimer
from c2cserve.engine.gpu.weight_loads import WeightLoads
from c2cserve.engine.models.config import ModelConfig
from c2cserve.engine.moved import MovedBytes
from c2cserve.engine.rotation import HostKv
from c2cserve.grammars.memory import MaskMemory
from c2cserve.kernels.gpu.aot.flash_modules import FlashKind
from c2cserve.kernels.gpu.aot.repository import KernelMissingError, Repository
from c2cserve.kernels.gpu.aot.warm import COMMON, Sizes, touch_libraries, warm
from c2cserve.kernels.gpu.attention.flash import Flash
from c2cserve.kernels.gpu.attention.flash_library import FlashInfer
from c2cserve.kernels.gpu.driver import CudaError
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, ProfileError, load_profile
from c2cserve.kernels.gpu.gemm.dataflows.table import SERVING_VARIANTS
from c2cserve.kernels.gpu.gemm.hybrid_linear import HybridGemms
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.gemm.long_rows import FirstUses
from c2cserve.kernels.gpu.gemm.published.algorithm1 import SERVED
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.kernels.native import KernelsMissing
from c2cserve.memory.hbm_cache import CacheCounts, CachePolicy, HbmCache
from c2cserve.memory.peer_pool import Borrower, PeerPool
from c2cserve.memory.pinning import PinningError, pin_array
from c2cserve.transfer.engine import LinkError, Ticket, TransferEngine, TransferError
from c2cserve.transfer.gpus import engine_of

log = logging.getLogger(__name__)

_FATAL = (
    torch.AcceleratorError, torch.OutOfMemoryError, CudaError, LinkError, TransferError,
)  # fmt: skip

SETUP_ERRORS = (
    KernelMissingError, KernelsMissing, ProfileError, GpuMemoryError, PinningError, CudaError,
    LinkError,
)  # fmt: skip
"""The exceptions of `open_gpu` that a user can do something about."""


@dataclass(frozen=True, slots=True)
class GpuParts:
    """The parts of a GPU slice that its executor uses, and that models are attached with."""

    device: torch.device
    stream: torch.cuda.Stream
    context: LaunchContext
    linear: Linear
    ops: GpuOps
    arena: Tensor
    to_device: Staging
    cache: HbmCache | None
    loads: WeightLoads[Ticket] | None
    """The loads of whole models, on a slice that swaps weights."""
    peers: Borrower | None
    """The slice's view of weights copied to other GPUs."""
    host_kv: HostKv
    """The KV of paused requests."""
    flashinfer: FlashInfer
    streaming: GpuLane | None
    """The lane of steps whose weights stream. All that is above is the other lane's, or both's."""
    fence: LaneFence
    timer: EventTimer[torch.cuda.Event]
    masks: MaskMemory
    """The memory of grammars' masks, which the GPU reads."""
    first_uses: FirstUses
    """GEMMs of prompts that cuBLAS has still to be shown. They run while the slice has time."""
    chooser: Chooser
    hybrid: HybridGemms | None
    """C2CServe's GEMMs, if the slice runs them."""

    @property
    def linears(self) -> list[Linear]:
        """The GEMMs of each lane."""
        return [self.linear, *([self.streaming.linear] if self.streaming else [])]

    @property
    def graphs(self) -> list[DecodeGraphs]:
        """The decode graphs of each lane."""
        ops = [self.ops, *([self.streaming.ops] if self.streaming else [])]
        return [one.graphs for one in ops if one.graphs is not None]

    @property
    def flashes(self) -> list[Flash]:
        """The attention of long prompts of each lane."""
        libraries = [self.flashinfer, *([self.streaming.flashinfer] if self.streaming else [])]
        return [library.flash for library in libraries]

    def moved(self) -> MovedBytes:
        """Return the bytes that launches of all lanes have moved so far."""
        counts, hybrid = CacheCounts() if self.cache is None else self.cache.counts, self.hybrid
        if hybrid is None:
            return MovedBytes(counts.streamed_bytes, counts.peer_bytes)
        return MovedBytes(
            counts.streamed_bytes + hybrid.reread_bytes,
            counts.peer_bytes + hybrid.reread_peer_bytes, hybrid.hbm_bytes,
        )  # fmt: skip

    def chunk_costs(self, config: ModelConfig, most: int) -> tuple[ChunkCost, ...]:
        """Return what prompts' chunks of up to `most` tokens take with hybrid GEMMs."""
        assert self.hybrid is not None
        home, dtype = "host" if self.peers is None else "peer", sizes_of(config).dtype
        sms, alpha = self.context.picked_for, self.hybrid.first_alpha
        return chunk_costs(self.chooser, config, dtype, home, sms, alpha, most)

    def hbm_bytes_per_s(self) -> float:
        """Return the slice's share of HBM's rate, in proportion to its SMs, as MIG divides it. If
        so many SMs read less, it is what they read."""
        whole = torch.cuda.get_device_properties(self.device).multi_processor_count
        sms, rate = self.context.sms, self.chooser.hbm_bytes_per_s
        return min(rate(sms), rate(whole) * sms / whole)

    def arrived(self, model: str) -> int | None:
        """Return how many of a model's layers have come to HBM (`engine.parked.Arrived`)."""
        return None if self.loads is None else self.loads.arrived(model)

    def warm(self, config: ModelConfig) -> None:
        """Compile, load and allocate everything that a model needs; quick after another model of
        its kind. `first_uses` has the rest. Raises ValueError for a model that GPU slices cannot
        run."""
        sizes = sizes_of(config)
        warm(sizes, self.device)
        for windowed in sorted({window > 0 for window in config.windows}):
            kind = FlashKind(sizes.dtype, sizes.head_dim, windowed)
            self.flashinfer.load(kind, sizes.heads, sizes.kv_heads)
            if self.streaming is not None:
                with self.streaming.current():
                    self.streaming.flashinfer.load(kind, sizes.heads, sizes.kv_heads)
        touch_libraries(sizes, self.device)
        self.first_uses.add(shapes_of(config, sizes.dtype))

    def fatal(self, fault: Exception) -> bool:
        """Return whether the process must not serve another request.

        CUDA's errors stick, and a slice without memory is rebuilt with all of it. Triton and cuBLAS
        raise a plain `RuntimeError`: then the state of the stream shows whether the error stuck.
        """
        return _fatal(fault, self.stream)

    def renew(self) -> None:
        """Build anew what a failed step may have left half done. Raises CUDA's errors.

        That is all of the slice's state on the GPU but KV: graphs, work memory, plans, and weights
        on their way into the cache. Models and kernels stay, and whole models in the cache.
        """
        self.finish()
        with self.current():  # a step of the other lane may have failed
            self.context.renew()
            self.ops.renew()
            self.to_device.renew()
            self.flashinfer.flash.renew()
        if self.streaming is not None:
            self.streaming.renew()
        if self.cache is not None:
            self.cache.clear()
        if self.loads is not None:
            self.loads.drop()

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which the thread's work goes to the resident lane."""
        return torch.cuda.stream(self.stream)

    def finish(self) -> None:
        """Wait for the slice's own work on the GPU."""
        self.stream.synchronize()
        self.context.copies.synchronize()
        if self.streaming is not None:
            self.streaming.finish()
        if self.loads is not None:
            self.loads.synchronize()


def open_gpu(
    device: int,
    kv_bytes: int,
    host_sampler: HostSampler,
    *,
    partition: Partition | None = None,
    profile: ProfileChoice = "measured",
    kernels: Path | None = None,
    notify: Callable[[], None] | None = None,
    cache_policy: CachePolicy | None = None,
    swaps_weights: bool = False,
    peers: PeerPool | None = None,
    transfers: TransferEngine | None = None,
    host_kv_bytes: int = 0,
    lanes: int = 1,
    hybrid_alpha: float | None = None,
) -> GpuParts:
    """Make the calling thread a slice's thread, and set the slice up.

    The thread's work goes to the slice's own stream from now on. The stream runs on `partition`'s
    SMs, or on all of the GPU `device`.

    `notify` is called from another thread when a step or a load is over. With `swaps_weights` whole
    models are loaded into the part of the arena that KV leaves. Else `cache_policy` decides which
    weights stay there as they stream by; without one no weight does. `peers` knows which other
    weights can be read on another GPU. `transfers` carries loads and KV; without it the process's
    engine over the one link of `device` does. `host_kv_bytes` is the size of the host memory,
    registered here, that KV may rotate through. With two `lanes` steps whose weights stream have a
    lane of their own (`engine.gpu.lanes`); partitions have one lane. `hybrid_alpha`: GEMMs are
    C2CServe's, and begin with this alpha.

    Raises `KernelMissingError`, `ProfileError` (both say which command helps), `GpuMemoryError`,
    `KernelsMissing`, `PinningError`, `LinkError` and `CudaError`.
    """
    streams = _streams(device, partition, lanes)
    repository = Repository(device, kernels)
    repository.load(SERVING_VARIANTS)
    torch_device = torch.device("cuda", device)
    arena = gpu_arena(torch_device, kv_bytes, "--gpu-kv-bytes")
    chooser = Chooser(_profile(device, profile))
    if partition is None:
        contexts = lane_contexts(device, repository, chooser, lanes)
    else:
        contexts = [LaunchContext(device, repository, partition.sms)]
    wake = notify or _nothing
    if transfers is None and (swaps_weights or host_kv_bytes):
        transfers = engine_of((device,), profile=profile)
    copies = None
    if swaps_weights:
        copies = _load_transfers(transfers, torch_device, streams, wake, peers)
    borrower = _borrower(peers, chooser, streams, copies)
    fence = LaneFence(dict(zip(LANES, streams, strict=False)))
    cache, loads = _weight_cache(arena, streams[0], copies, cache_policy, borrower, fence)
    hybrid = None
    if hybrid_alpha is not None:
        repository.load(SERVED)
        hybrid = HybridGemms(hybrid_alpha, None if cache is None else cache.model_of)
    lane, *beside = [
        GpuLane.open(stream, context, chooser, cache, host_sampler, notify, kernels, hybrid)
        for stream, context in zip(streams, contexts, strict=True)
    ]
    host_kv = open_host_kv(transfers, arena, host_kv_bytes, lane.stream, wake)
    parts = GpuParts(
        torch_device, lane.stream, lane.context, lane.linear, lane.ops, arena, lane.to_device,
        cache, loads, borrower, host_kv, lane.flashinfer, next(iter(beside), None), fence,
        lane.timer, _mask_memory(), FirstUses(arena), chooser, hybrid,
    )  # fmt: skip
    _warm_common(parts)
    return parts


def _streams(device: int, partition: Partition | None, lanes: int) -> list[torch.cuda.Stream]:
    """Make the calling thread one of the device. Return the lanes' streams; its own is first."""
    torch.cuda.set_device(device)
    assert lanes == 1 or partition is None, "the lanes of a partition would need streams of it"
    streams = lane_streams(device, lanes) if partition is None else [partition.stream]
    torch.cuda.set_stream(streams[0])
    # Partial sums of split GEMMs in 16 bits would make a row depend more on its batch.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return streams


def _borrower(
    peers: PeerPool | None, chooser: Chooser, streams: Sequence[torch.cuda.Stream],
    copies: LoadTransfers | None,
) -> Borrower | None:  # fmt: skip
    if peers is None:
        return None
    chooser.link_bytes_per_s("peer")  # raises where the profile does not have it
    return Borrower(peers, marker(streams) if copies is None else marker(streams, copies.marks))


def _weight_cache(
    arena: Tensor, stream: torch.cuda.Stream, copies: LoadTransfers | None,
    policy: CachePolicy | None, borrower: Borrower | None, fence: LaneFence,
) -> tuple[HbmCache | None, WeightLoads[Ticket] | None]:  # fmt: skip
    if copies is None:
        cache = None if policy is None else HbmCache(arena, policy, borrower, fence.dropped)
        return cache, None
    cache = HbmCache(arena, None, borrower, fence.dropped)

    def fatal(fault: Exception) -> bool:
        return _fatal(fault, stream)

    return cache, WeightLoads(cache, copies, time.monotonic, fatal)


def _nothing() -> None:
    pass


def _load_transfers(
    engine: TransferEngine | None, device: torch.device, streams: Sequence[torch.cuda.Stream],
    notify: Callable[[], None], peers: PeerPool | None,
) -> LoadTransfers:  # fmt: skip
    assert engine is not None
    gpu_of = _no_peers if peers is None else peers.gpu_of
    return LoadTransfers(engine, device, streams, notify, gpu_of)


def _no_peers(address: int) -> int:
    raise AssertionError(f"no neighbour has the weights at {address:#x}")


def _mask_memory() -> MaskMemory:
    """Allocate host memory for masks, and register what the GPU reads. Raises PinningError."""
    memory = MaskMemory()
    memory.register(lambda data: pin_array(data).address)
    return memory


def sizes_of(config: ModelConfig) -> Sizes:
    """Return the sizes of a model's kernels. Raises ValueError for a dtype that GPU slices do not
    run."""
    dtype: HalfDtype
    match config.dtype:
        case "bfloat16" | "float16":
            dtype = config.dtype
        case _:
            raise ValueError(
                f"GPU slices run bfloat16 and float16, not {config.dtype}: set the model's `dtype`"
            )
    moe = config.moe
    return Sizes(
        hidden=config.hidden,
        inner=config.intermediate if moe is None else moe.intermediate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        dtype=dtype,
        qk_norm=config.qk_norm,
        top_k=0 if moe is None else moe.per_token,
    )


def _profile(device: int, choice: ProfileChoice) -> Profile:
    name = torch.cuda.get_device_name(device)
    if choice == "measured":
        return load_profile(gpu=name)
    assumed = assumed_profile(name, torch.cuda.get_device_properties(device).total_memory)
    log.warning("dataflows on %s are picked by %s", name, assumed.note)
    return assumed.profile


def _fatal(fault: Exception, stream: torch.cuda.Stream) -> bool:
    """See `GpuParts.fatal`."""
    if isinstance(fault, _FATAL):
        return True
    try:
        stream.query()
    except torch.AcceleratorError:
        return True
    return False


def _warm_common(parts: GpuParts) -> None:
    """Load what most models need, before there are any."""
    for sizes in COMMON:
        warm(sizes, parts.device)
    if parts.streaming is not None:
        with parts.streaming.current():  # now: later it would wait for a stream's steps
            touch_libraries(COMMON[0], parts.device)
    parts.finish()
