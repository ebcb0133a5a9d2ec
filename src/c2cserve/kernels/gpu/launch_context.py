"""Where kernels run: a GPU or a partition of one, its streams, its kernels and its work memory."""

import ctypes
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu import driver
from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.aot.variants import SHARED_BYTES, THREADS, Variant
from c2cserve.kernels.gpu.driver import cu
from c2cserve.kernels.gpu.launcher import current_stream

_SLOTS = 2
"""The number of slots for whole weights. One is filled while the other is in use."""


class Slot:
    """Memory in HBM for one streamed weight at a time, reused once the last reader is done."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self.free = torch.cuda.Event()

    def hold(self, size: int) -> Tensor:
        """Return `size` bytes of it, uint8."""
        if self._memory is None or self._memory.numel() < size:
            # torch's cache reuses the old memory in one stream's order, and other streams use it.
            torch.cuda.synchronize(self._device)
            self._memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device}")
        return self._memory[:size]


class LaunchContext:
    """Launches kernels on torch's current stream, with grids that fit `sms` SMs.

    Not thread-safe: a context belongs to one lane of one slice, and to the slice's thread.
    """

    def __init__(
        self, device: int, repository: Repository, sms: int | None = None, *,
        readers: Mapping[Home, int] | None = None, spared_sms: int = 0,
        picked_for: int | None = None,
    ) -> None:  # fmt: skip
        """Other kernels run beside this context's in two cases.

        `readers`: at most so many CTAs read W from a home, or one cluster if that is larger. No
        kernel begins before they have ended: it would take SMs that it has no use for yet. The
        kernels beside have all other SMs. `spared_sms`: grids leave so many SMs to the readers
        beside, wherever those lie. Neither changes a result.

        `picked_for`: dataflows are picked for so many SMs (None: for all). That may change the last
        bits of a result, so it is the same in all lanes of a slice.
        """
        self.device = device
        self.readers: Mapping[Home, int] = readers or {}
        self._spared_sms = spared_sms
        self._word: Tensor | None = None
        if self.readers:
            self._word = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
        self.repository = repository
        whole = torch.cuda.get_device_properties(device).multi_processor_count
        self.sms = min(sms or whole, whole)
        self.picked_for = picked_for or self.sms
        self.copies = driver.new_stream(device)
        """The stream of the copy engines, which work while kernels run. It is not one of torch's 32
        pooled streams, as kernels might be launched on the same one."""
        self._slots = [Slot(device) for _ in range(_SLOTS)]
        self._turn = 0
        self._scratch: dict[str, Tensor] = {}
        self._clusters: dict[Variant, int] = {}
        self.plans: dict[Hashable, Any] = {}
        """Launchers' own, of launches that come again."""
        self._share: Tensor | None = None
        self._share_bytes_per_s = 0.0

    def renew(self) -> None:
        """Forget what a failed step may have left half done: slots, scratch memory and the share of
        the link. Nothing runs meanwhile, and no graph holds their addresses any more."""
        self._slots = [Slot(self.device) for _ in range(_SLOTS)]
        self._scratch.clear()
        self._share, self._share_bytes_per_s = None, 0.0

    @property
    def stream(self) -> int:
        return current_stream(self.device)

    def limit_link(self, bytes_per_s: float) -> None:
        """Limit the rate at which kernels stream weights from now on, in stream order; 0: no limit.

        The limit holds in graphs, too. The chip's arbiters do not divide a link equally among
        slices: of 395 GB/s, one gets 80 and others 47. Copy engines divide it equally.
        """
        if self._share is None:
            if bytes_per_s == 0.0:
                return
            self._share = torch.zeros(1, dtype=torch.float32, device=f"cuda:{self.device}")
        if bytes_per_s != self._share_bytes_per_s:
            self._share.fill_(1e9 / bytes_per_s if bytes_per_s else 0.0)
            self._share_bytes_per_s = bytes_per_s

    @property
    def share_pointer(self) -> int:
        """The address of the limit in nanoseconds per byte, float32 in GPU memory. It is 0 as long
        as no limit was ever set."""
        return 0 if self._share is None else self._share.data_ptr()

    def begin_capture(self) -> None:
        """Make copies part of the CUDA graph. Called first in its capture."""
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        self._forget_readers()

    def end_capture(self) -> None:
        """Join the copies, and drop events that work outside the graph cannot wait for. Called last
        in its capture."""
        torch.cuda.current_stream(self.device).wait_stream(self.copies)
        self._forget_readers()

    def _forget_readers(self) -> None:
        for slot in self._slots:
            slot.free = torch.cuda.Event()

    def next_slot(self) -> Slot:
        self._turn = (self._turn + 1) % _SLOTS
        return self._slots[self._turn]

    def scratch(self, name: str, size: int) -> Tensor:
        """Return `size` bytes (uint8) for one launch. The next one of this name overwrites them."""
        memory = self._scratch.get(name)
        if memory is None or memory.numel() < size:
            torch.cuda.synchronize(self.device)
            memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.device}")
            self._scratch[name] = memory
        return memory[:size]

    def clusters(self, variant: Variant, home: Home = "hbm") -> int:
        """Return how many clusters of a variant run at once, with W at `home`.

        Raises `CudaError` if not one does.
        """
        fits = self._fitting(variant)
        readers = self.readers.get(home)
        return fits if readers is None else min(fits, max(1, readers // variant.cluster))

    def _fitting(self, variant: Variant) -> int:
        if variant not in self._clusters:
            room = self.sms // variant.cluster
            fits = min(room, _resident_clusters(self.repository, variant)) if room else 0
            if fits:
                # A cluster lies in one group of SMs, so each SM of a reader may take the place of
                # one. A cluster that finds no place would wait for the end of all others.
                fits = max(1, fits - self._spared_sms)
            if fits < 1:
                raise driver.CudaError(
                    f"{variant.name} needs clusters of {variant.cluster} SMs;"
                    f" this slice of {self.sms} has no room for one"
                )
            self._clusters[variant] = fits
        return self._clusters[variant]

    def launch(
        self, variant: Variant, clusters: int, parameters: ctypes.Array[ctypes.c_char], *,
        pdl: bool = False, home: Home = "hbm",
    ) -> None:  # fmt: skip
        """Launch a variant, with W at `home`. Raises `KernelMissingError`, `CudaError`."""
        kernel = self.repository.kernel(variant)
        self.run(kernel, clusters * variant.cluster, parameters, pdl=pdl, home=home)

    def run(
        self, kernel: Any, ctas: int, parameters: ctypes.Array[ctypes.c_char], *,
        pdl: bool = False, home: Home = "hbm",
    ) -> None:  # fmt: skip
        """Launch one of the repository's kernels. Raises `CudaError`."""
        stream = self.stream
        driver.launch(kernel, ctas, THREADS, SHARED_BYTES, stream, parameters, pdl=pdl)
        if self._word is not None and home in self.readers:
            driver.hold_back(stream, self._word.data_ptr())


@cache
def _resident_clusters(repository: Repository, variant: Variant) -> int:
    """Return how many clusters of a variant fit on the whole GPU.

    They may be fewer than its SMs would make: a cluster lies in one group of SMs, and some of a
    chip's groups are smaller.
    """
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
