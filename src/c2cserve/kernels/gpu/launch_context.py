"""Where kernels run: a GPU or a partition of one, its streams, its kernels and its work memory."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from c2cserve.kernels.gpu import driver
from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.aot.variants import SHARED_BYTES, THREADS, Variant
from c2cserve.kernels.gpu.driver import cu

_SLOTS = 2
"""Places for whole weights: one is filled while the other is in use."""


class Slot:
    """A place in HBM for a weight on its way through. Reused once its last reader is done."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self.free = torch.cuda.Event()

    def hold(self, size: int) -> Tensor:
        """Return at least `size` bytes of it, uint8."""
        if self._memory is None or self._memory.numel() < size:
            # Old memory goes back to torch's cache, which hands it on in stream order only.
            torch.cuda.synchronize(self._device)
            self._memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device}")
        return self._memory[:size]


class LaunchContext:
    """Launches go to torch's current stream; `sms` bounds their grids. Not thread-safe: a context
    belongs to one thread, as a slice does."""

    def __init__(self, device: int, repository: Repository, sms: int | None = None) -> None:
        self.device = device
        self.repository = repository
        whole = torch.cuda.get_device_properties(device).multi_processor_count
        self.sms = min(sms or whole, whole)
        self.copies = driver.new_stream(device)
        """Where copy engines work, beside the kernels. Its own: torch's streams come from a pool
        of 32, and the one that launches kernels could be the same."""
        self._slots = [Slot(device) for _ in range(_SLOTS)]
        self._turn = 0
        self._scratch: dict[str, Tensor] = {}
        self._clusters: dict[Variant, int] = {}
        self._share: Tensor | None = None
        self._share_bytes_per_s = 0.0

    def renew(self) -> None:
        """Forget what a failed step may have left half done: slots, scratch memory and the share of
        the link. Nothing runs meanwhile, and graphs that know their addresses are gone."""
        self._slots = [Slot(self.device) for _ in range(_SLOTS)]
        self._scratch.clear()
        self._share, self._share_bytes_per_s = None, 0.0

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def limit_link(self, bytes_per_s: float) -> None:
        """The share of the link that kernels stream weights at from here on in stream order, also
        those in graphs; 0: as fast as weights come. Arbiters on the chip are not fair to slices
        that share a link: 80 of 395 GB/s for one, 47 for others. Copy engines are."""
        if self._share is None:
            if bytes_per_s == 0.0:
                return
            self._share = torch.zeros(1, dtype=torch.float32, device=f"cuda:{self.device}")
        if bytes_per_s != self._share_bytes_per_s:
            self._share.fill_(1e9 / bytes_per_s if bytes_per_s else 0.0)
            self._share_bytes_per_s = bytes_per_s

    @property
    def share_pointer(self) -> int:
        """Nanoseconds per byte of that share, float32 in GPU memory; 0: there was never a limit."""
        return 0 if self._share is None else self._share.data_ptr()

    def begin_capture(self) -> None:
        """First thing in the capture of a CUDA graph: copies become part of it."""
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        self._forget_readers()

    def end_capture(self) -> None:
        """Last thing in the capture: copies have joined, nothing outside waits for its events."""
        torch.cuda.current_stream(self.device).wait_stream(self.copies)
        self._forget_readers()

    def _forget_readers(self) -> None:
        for slot in self._slots:
            slot.free = torch.cuda.Event()

    def next_slot(self) -> Slot:
        self._turn = (self._turn + 1) % _SLOTS
        return self._slots[self._turn]

    def scratch(self, name: str, size: int) -> Tensor:
        """`size` bytes (uint8) that one launch uses and the next of that name may overwrite."""
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < size:
            torch.cuda.synchronize(self.device)
            kept = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.device}")
            self._scratch[name] = kept
        return kept[:size]

    def clusters(self, variant: Variant) -> int:
        """How many clusters of a variant run at once. Raises `CudaError` if not even one does."""
        if variant not in self._clusters:
            room = self.sms // variant.cluster
            fits = min(room, _resident_clusters(self.repository, variant)) if room else 0
            if fits < 1:
                raise driver.CudaError(
                    f"{variant.name} needs clusters of {variant.cluster} SMs;"
                    f" this slice of {self.sms} has no room for one"
                )
            self._clusters[variant] = fits
        return self._clusters[variant]

    def launch(
        self, variant: Variant, clusters: int, parameters: ctypes.Structure, *, pdl: bool = False
    ) -> None:
        """Raises `KernelMissingError`, `CudaError`."""
        driver.launch(
            self.repository.kernel(variant), clusters * variant.cluster, THREADS,
            SHARED_BYTES, self.stream, parameters, pdl=pdl,
        )  # fmt: skip


@cache
def _resident_clusters(repository: Repository, variant: Variant) -> int:
    """Not all SMs can be part of a large cluster: some of the chip's groups of SMs are smaller."""
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = variant.cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = SHARED_BYTES
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = variant.cluster
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [attribute], 1
    function: Any = cu.CUfunction(int(repository.kernel(variant)))
    result = cu.cuOccupancyMaxActiveClusters(function, config)
    return int(driver.checked(f"cuOccupancyMaxActiveClusters({variant.name})", result))
