"""Models and prefixes from host memory without a GPU: bytes arrive, ratios are complete."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cold_start
import pytest
import torch
from fake_gpu import DEVICE, FakeMachine, PlainKernels

from c2cserve.engine.gpu import ops
from c2cserve.engine.gpu.kv_copies import KvCopies
from c2cserve.engine.rotation import HostKv
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.settings import Settings

sys.path.append(str(Path(__file__).parent.parent / "transfer"))
from called_links import CalledEngine
from thread_links import ThreadLinks

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are interpreted here")
SETTINGS = Settings(task_bytes=4096, task_bytes_most=8192, alone_bytes=8192, one_path_bytes=0)


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
    assert [row["tokens"] for row in results["prefix"]] == [48, 80]
    assert all(row["over_computing"] > 0 for row in results["prefix"])
    assert len(results["bars"]) == 2
