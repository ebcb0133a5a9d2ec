"""CUDA graphs without CUDA: what is captured is called again by a replay. Pools are counted as
torch's allocator counts them, and it refuses what that refuses."""

# ruff: noqa: N802

from collections.abc import Callable
from typing import Any

import pytest
import torch


class FakeAllocator:
    """`c10/cuda/CUDACachingAllocator.cpp`, as far as graphs meet it."""

    def __init__(self) -> None:
        self.users: dict[tuple[int, int], int] = {}
        self.host_users: dict[tuple[int, int], int] = {}
        """Of pools of pinned memory. `torch.cuda.MemPool` is none: there, only graphs count."""
        self.recording: list[tuple[int, int]] = []
        self.recording_host: list[tuple[int, int]] = []
        """`ATen/core/CachingHostAllocator.h`: only a capture that ends well takes its pool away."""
        self.fails: list[str] = []
        """Of the next captures: `begin` or `end`."""
        self.open: FakeGraph | None = None
        self.asks_the_dead = False
        """A graph went whom the host allocator goes on asking about every allocation."""

    def hold(self, pool: tuple[int, int]) -> None:
        if pool in self.users and self.users[pool] == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.users[pool] = self.users.get(pool, 0) + 1

    def begin(self, pool: tuple[int, int]) -> None:
        self.hold(pool)
        if self.host_users.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.host_users[pool] = self.host_users.get(pool, 0) + 1
        if pool in self.recording or pool in self.recording_host:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.append(pool)
        self.recording_host.append(pool)

    def _cuda_endAllocateToPool(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def _cuda_releasePool(self, device: int, pool: tuple[int, int]) -> None:
        self.users[pool] -= 1


class FakePool:
    def __init__(self, allocator: FakeAllocator) -> None:
        self.id = (0, len(allocator.users) + 1)
        self._allocator = allocator
        allocator.hold(self.id)

    def use_count(self) -> int:
        return self._allocator.users[self.id]


class FakeGraph:
    def __init__(self, allocator: FakeAllocator) -> None:
        self._allocator = allocator
        self._pool: tuple[int, int] | None = None
        self._begun: tuple[int, int] | None = None
        self._launched: list[Callable[[], None]] = []

    def capture_begin(self, *, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._allocator.begin(pool)
        self._begun = pool
        if self._allocator.fails[:1] == ["begin"]:
            del self._allocator.fails[0]
            raise RuntimeError("cudaStreamBeginCapture")
        self._pool, self._allocator.open = pool, self

    def capture_end(self) -> None:
        self._allocator.open = None
        if self._allocator.fails[:1] == ["end"]:
            del self._allocator.fails[0]
            self._pool = None
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        assert self._pool is not None
        self._allocator._cuda_endAllocateToPool(0, self._pool)
        self._allocator.recording_host.remove(self._pool)

    def launch(self, kernel: Callable[[], None]) -> None:
        self._launched.append(kernel)

    def replay(self) -> None:
        for kernel in self._launched:
            kernel()

    def reset(self) -> None:
        if self._pool is not None:
            self._allocator._cuda_releasePool(0, self._pool)
            self._allocator.host_users[self._pool] -= 1
        self._pool = None

    def __del__(self) -> None:
        self._allocator.asks_the_dead |= self._begun in self._allocator.recording_host
        self.reset()


def install(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    """In place of torch's, for `engine.gpu.graph_pool`."""
    from c2cserve.engine.gpu import graph_pool

    allocator = FakeAllocator()

    def module(_: str) -> Any:
        return allocator

    monkeypatch.setattr(torch.cuda, "MemPool", lambda: FakePool(allocator))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(allocator))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(graph_pool, "import_module", module)
    return allocator
