"""The GPU under a benchmark: buffers at each home, what its links, memory and tensor cores do at
best, marks in its streams."""

import contextlib
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from host_memory import grow_memory
from torch import Tensor

from c2cserve.core.machine import ProfileChoice
from c2cserve.core.tensors import Home
from c2cserve.engine.gpu.ops import GpuOps
from c2cserve.engine.gpu.setup import SETUP_ERRORS as OPENING_ERRORS
from c2cserve.engine.gpu.setup import open_gpu
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu.attention.flash import Flash
from c2cserve.kernels.gpu.driver import enable_peer
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, ProfileError, load_profile
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.gemm.measure import chain_s, copy_bytes_per_s
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.memory.pinning import PinnedRegion
from c2cserve.policy.weights.hbm_residency import Residency

DEVICE, PEER = 0, 1
_PIECE = 64 << 20
"""Random numbers made once; buffers repeat them."""
_COPIED_BYTES = 1 << 30
_CLOCK_HERTZ = 2.0e9
"""No lower than a Hopper GPU's highest."""
_MATMULS = ((8192, 8192, 8192), (8192, 16384, 4096), (8192, 28672, 4096), (16384, 16384, 4096))
"""Rows, columns, K: the peak is the best of them."""


class NoGpu(RuntimeError):
    """This machine has none that torch can use."""


SETUP_ERRORS = (*OPENING_ERRORS, NoGpu)
"""What `Gpu` raises for reasons a user can do something about."""


class Gpu:
    """`gpu_engine_run.Machine`: a slice of a whole GPU, as a worker opens one, with another GPU's
    memory as `peer`. The calling thread's work goes to the slice's stream."""

    def __init__(
        self, kv_bytes: int, rates: ProfileChoice | None = None, *, device: int = DEVICE
    ) -> None:
        """`rates`: by what GEMM kernels are picked; None: a profile of this GPU if there is one.
        `device`: the first GPU or the second; the other one is the peer."""
        if not torch.cuda.is_available():
            raise NoGpu(f"torch {torch.__version__} sees no GPU")
        self._device, self._peer = device, PEER if device == DEVICE else DEVICE
        self.name = torch.cuda.get_device_name(self._device)
        profile, self.choice, self.picked_by = _profile(self.name, rates)
        self._chooser = Chooser(profile)
        self.host_sampler = CpuOps(1).sample
        self._parts = open_gpu(self._device, kv_bytes, self.host_sampler, profile=self.choice)
        self.device, self.arena = self._parts.device, self._parts.arena
        self.staging, self.warm = self._parts.to_device, self._parts.warm
        self.context = self._parts.context
        self.flash: Flash | None = self._parts.flashinfer.flash
        self.homes: list[Home] = ["host"]
        own, peer = self._device, self._peer
        if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(own, peer):
            enable_peer(own, peer)
            self.homes.insert(0, "peer")
        self._buffers: dict[Home, Tensor] = {}
        self._pinned: PinnedRegion | None = None
        self._random = (torch.randn(_PIECE, device=self.device) * 0.02).bfloat16()

    def warm_gemms(self) -> tuple[int, float]:
        """Run GEMMs of usual prompts once, of all models that were warmed. Return how many there
        are, and the seconds of the host."""
        uses = self._parts.first_uses
        while uses.go_on(idle=True):
            pass
        self.synchronize()
        return uses.done, uses.seconds

    # ---- memory ---------------------------------------------------------------------------------

    def buffer(self, home: Home, size: int) -> Tensor:
        """At least `size` bytes (uint8) there, of bfloat16 numbers of standard deviation 0.02; the
        same memory each time."""
        kept = self._buffers.get(home)
        if kept is None or kept.numel() < size:
            if kept is not None:
                raise ValueError(f"the buffer at {home} has {kept.numel()} bytes, not {size}")
            kept = self._buffers[home] = self._allocate(home, size)
            source = self._random.cpu() if home == "host" else self._random
            whole = kept.view(torch.bfloat16)
            for start in range(0, whole.numel(), _PIECE):
                piece = whole[start : start + _PIECE]
                piece.copy_(source[: piece.numel()])
            if home == "host":
                self._pinned = PinnedRegion(kept.data_ptr(), kept.numel())
            self.synchronize()
        return kept

    def _allocate(self, home: Home, size: int) -> Tensor:
        if home != "host":
            device = self._device if home == "hbm" else self._peer
            return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        grow_memory(size)
        # As the pool does it, and not by torch, which rounds up to a power of two.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages serves as well
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def free_bytes(self) -> int:
        """Of HBM; what this process kept for later counts as free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """On the current stream, as a user would do it."""
        target.copy_(source, non_blocking=True)

    # ---- multiplying ----------------------------------------------------------------------------

    def linear(self, kept_bytes: int = 0) -> tuple[Linear, HbmCache | None]:
        """GEMMs, with so much HBM to keep weights in."""
        if not kept_bytes:
            return Linear(self.context, self._chooser), None
        room = torch.empty(kept_bytes, dtype=torch.uint8, device=self.device)
        cache = HbmCache(room, Residency(kept_bytes))
        return self.linear_of(cache), cache

    def linear_of(self, cache: HbmCache) -> Linear:
        return Linear(self.context, self._chooser, cache)

    def capture_decoding(self, ops: GpuOps, linear: Linear, cache: HbmCache | None) -> None:
        ops.capture_decoding(linear.launched, cache)

    # ---- time -----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def hold(self, seconds: float) -> None:
        """Keep the GPU busy: what is launched next starts no earlier."""
        sleep: Any = vars(torch.cuda)["_sleep"]
        sleep(int(seconds * _CLOCK_HERTZ))

    def elapsed_s(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def chain_s(self, steps: Sequence[Callable[[], object]]) -> float:
        """Seconds of one of the steps, in a CUDA graph of all."""
        return chain_s(self.context, steps)

    # ---- limits ---------------------------------------------------------------------------------

    def limits(self, size: int) -> dict[str, Any]:
        """`size`: of buffers, bytes. Nothing can be faster than these."""
        count = min(size, _COPIED_BYTES)
        here = torch.empty(count, dtype=torch.uint8, device=self.device)
        links = {home: copy_bytes_per_s(here, self.buffer(home, size)[:count])
                 for home in self.homes}  # fmt: skip
        local = self.buffer("hbm", size)[:count]
        return {
            "link_bytes_per_s": links,
            "hbm_bytes_per_s": 2 * copy_bytes_per_s(here, local),
            "matmul_flops": max(self._matmul_flops(*shape) for shape in _MATMULS),
        }

    def _matmul_flops(self, m: int, n: int, k: int) -> float:
        x = torch.randn(m, k, device=self.device).bfloat16()
        w = torch.randn(n, k, device=self.device).bfloat16()
        out = torch.empty(m, n, dtype=torch.bfloat16, device=self.device)
        seconds = self.chain_s([lambda: torch.mm(x, w.t(), out=out)] * 8)
        return 2.0 * m * n * k / seconds


def _profile(gpu: str, rates: ProfileChoice | None) -> tuple[Profile, ProfileChoice, str]:
    """What to pick by. Without a profile, known speeds: the results say so."""
    known = assumed_profile(gpu, torch.cuda.get_device_properties(0).total_memory)
    if rates == "assumed":
        return known.profile, "assumed", known.note
    try:
        found = load_profile(gpu=gpu)
    except ProfileError as error:
        if rates == "measured":
            raise
        print(f"{error}: picks are by {known.note}", flush=True)
        return known.profile, "assumed", known.note
    return found, "measured", f"profile of {found.date:%Y-%m-%d %H:%M} UTC"
