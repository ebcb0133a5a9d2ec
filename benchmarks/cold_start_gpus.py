"""The GPUs of this machine for `cold_start.py`: the model is on the first one."""

import time
from contextlib import AbstractContextManager

import torch
from gpu_machine import DEVICE, Gpu
from gpu_models import config_of
from transfers_run import native, opened, timed

from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.gpu.kv_copies import KvCopies
from c2cserve.engine.gpu.load_transfers import LoadTransfers
from c2cserve.engine.gpu.weight_loads import WeightLoads
from c2cserve.engine.rotation import HostKv
from c2cserve.kernels.gpu.driver import new_stream
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.memory.pinning import PinnedRegion, pin_array
from c2cserve.transfer.engine import Ticket, TransferEngine
from c2cserve.transfer.moves import HOST, Segment

_LINKS_MOST = 2
_RATE_BYTES = 2 << 30
_SPARE_TOKENS = 16384


def _nobody() -> None:
    """Nobody is notified: the benchmark polls."""


def _no_neighbour(address: int) -> int:
    raise AssertionError(f"no neighbour has the weights at {address:#x}")


class GpuSite:
    def __init__(self, shape: str, longest: int) -> None:
        """`longest`: tokens of a request."""
        config = config_of(shape)
        token_bytes = 2 * 2 * config.layers * config.kv_heads * config.head_dim
        self.machine = Gpu((longest + _SPARE_TOKENS) * token_bytes, "assumed")
        self.links = min(_LINKS_MOST, torch.cuda.device_count())
        self._kv_bytes = longest * token_bytes
        self._host: tuple[torch.Tensor, PinnedRegion] | None = None
        self._computing = new_stream(DEVICE)

    def opened(self, links: int) -> AbstractContextManager[TransferEngine]:
        return opened(links)

    def loading(
        self, engine: TransferEngine, room: torch.Tensor
    ) -> tuple[Linear, HbmCache, WeightLoads[Ticket]]:
        cache = HbmCache(room, None)
        stream = torch.cuda.current_stream()
        copies = LoadTransfers(engine, self.machine.device, [stream], _nobody, _no_neighbour)
        loads = WeightLoads(cache, copies, time.perf_counter, lambda _: True)
        return self.machine.linear_of(cache), cache, loads

    def rate(self, links: int) -> float:
        source = self.machine.buffer("host", 1)  # the one that is there
        share = min(_RATE_BYTES, source.numel()) // links
        targets = [
            torch.empty(share, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(links)
        ]
        segments = [
            Segment(one.data_ptr(), source.data_ptr() + gpu * share, share, gpu, HOST)
            for gpu, one in enumerate(targets)
        ]
        return links * share / timed(native(segments), links * share).seconds

    def host_kv(self, engine: TransferEngine, size: int) -> HostKv:
        if self._host is None:
            memory = make_arena(self._kv_bytes)
            memory.zero_()
            self._host = memory, pin_array(memory.numpy())
        memory, region = self._host
        copies = KvCopies(engine, self.machine.arena, memory, region, self._computing, lambda: None)
        return HostKv(size, copies)
