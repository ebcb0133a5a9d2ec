"""Models and prefixes from host memory without a GPU: bytes arrive, ratios are complete."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cold_start
import pytest
import torch
from fake_gpu import DEVICE, FakeMachine, PlainKernels, PlainMultiply
from torch import Tensor

from c2cserve.engine.gpu import ops
from c2cserve.engine.gpu.kv_copies import KvCopies
from c2cserve.engine.gpu.load_transfers import LoadTransfers
from c2cserve.engine.gpu.weight_loads import WeightLoads
from c2cserve.engine.rotation import HostKv
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.transfer.engine import Ticket, TransferEngine
from c2cserve.transfer.settings import Settings

sys.path.append(str(Path(__file__).parent.parent / "transfer"))
from called_links import CalledEngine
from thread_links import ThreadLinks

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are interpreted here")
SETTINGS = Settings(task_bytes=4096, task_bytes_most=8192, alone_bytes=8192, one_path_bytes=0)


class FromCache(PlainMultiply):
    """GEMMs that read what a load has brought, and nothing else."""

    def __init__(self, cache: HbmCache) -> None:
        super().__init__()
        self._cache = cache

    def __call__(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        near = self._cache.location(w)
        assert near.home == "hbm", "a step reads weights that have not arrived"
        assert isinstance(near.owner, Tensor)
        there = near.owner.view(torch.bfloat16).view(w.shape)
        return super().__call__(x, replace(near, owner=there), bias)


class DrySite:
    links = 2

    def __init__(self) -> None:
        self.machine: Any = FakeMachine()
        self._threads = ThreadLinks()

    @contextmanager
    def opened(self, links: int) -> Generator[TransferEngine]:
        threads = self._threads = ThreadLinks()
        engine = CalledEngine(links, SETTINGS, threads, threaded=True)
        try:
            yield engine
        finally:
            engine.stop()
            threads.close()

    def loading(
        self, engine: TransferEngine, room: Tensor
    ) -> tuple[FromCache, HbmCache, WeightLoads[Ticket]]:
        cache = HbmCache(room, None)
        streams = [self._threads.streams.make()]
        copies = LoadTransfers(
            engine, torch.device("cuda", 0), cast("Any", streams), lambda: None, lambda _: 0
        )
        loads = WeightLoads(cache, copies, time.perf_counter, lambda _: True, part_bytes=1)
        return FromCache(cache), cache, loads

    def rate(self, links: int) -> float:
        return links * 1e9

    def host_kv(self, engine: TransferEngine, size: int) -> HostKv:
        arena = SimpleNamespace(
            device=torch.device("cuda", 0), data_ptr=self.machine.arena.data_ptr
        )
        parts = [cast("Any", one) for one in (arena, torch.zeros(size).byte(), None)]
        stream = cast("Any", self._threads.streams.make())
        copies = KvCopies(engine, parts[0], parts[1], parts[2], stream, lambda: None)
        return HostKv(size, copies)


def test_models_and_prefixes_come_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "elementwise", PlainKernels)
    monkeypatch.setattr(ops, "attend", PlainKernels.attend)
    for name, value in {"PROMPT": 20, "STEP_TOKENS": 32, "_ALIGNMENT": 4096, "_REPEATS": 2}.items():
        monkeypatch.setattr(cold_start, name, value)
    results = cold_start.measure(DrySite(), "tiny-llama", ("cold", "prefix"), (48, 80))
    assert [row["links"] for row in results["cold"]] == [1, 2]
    for row in results["cold"]:
        assert row["floor_s"] == pytest.approx(row["bytes"] / (row["links"] * 1e9))
        assert row["load_s"] < row["first_token_s"]
        assert row["first_token_after_load_s"] > 0
    assert [row["tokens"] for row in results["prefix"]] == [48, 80]
    assert all(row["over_computing"] > 0 for row in results["prefix"])
    assert len(results["bars"]) == 3
