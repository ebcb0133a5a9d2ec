"""Timing of GEMMs whose weights are at any home, in a way that makes runs comparable.

    graph    GEMM with W0 | GEMM with W1 | ... | GEMM with W15       time of one: the total over 16

A measurement replays a chain in a CUDA graph: the same GEMM with different weights, one after
another. This is as in a model. Launches cost the same, and no weight is in a cache because it was
just read.
"""

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from c2cserve.core.tensors import HalfDtype, Home
from c2cserve.kernels.gpu import driver
from c2cserve.kernels.gpu.gemm.weight import ITEM_BYTES, TORCH_DTYPES, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext

Step = Callable[[], object]
"""One launch or several."""

_CHAIN_MAX = 16
_REPLAYS_MIN = 5
_ALIGNMENT = 1 << 20


class WeightStore:
    """A buffer of random 16-bit numbers at a home. Every weight is a part of it."""

    def __init__(self, home: Home, size: int, dtype: HalfDtype, device: int, peer: int = 1) -> None:
        self.home: Home = home
        self.dtype: HalfDtype = dtype
        where = {"host": "cpu", "hbm": f"cuda:{device}", "peer": f"cuda:{peer}"}[home]
        count = size // ITEM_BYTES
        self._buffer = torch.empty(
            count, dtype=TORCH_DTYPES[dtype], device=where, pin_memory=home == "host"
        )
        some = torch.randn(min(count, 64 << 20), device=f"cuda:{device}") / 8
        for start in range(0, count, some.numel()):
            piece = self._buffer[start : start + some.numel()]
            piece.copy_(some[: piece.numel()])
        if home == "peer":
            driver.enable_peer(device, peer)
        torch.cuda.synchronize(device)

    def weights(self, shape: tuple[int, ...]) -> list[WeightHandle]:
        """Return different weights of a shape: as many as a chain has, or as fit. Raises
        `ValueError` if none does."""
        size = ITEM_BYTES
        for extent in shape:
            size *= extent
        stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        count = min(_CHAIN_MAX, self._buffer.numel() * ITEM_BYTES // stride)
        if count < 1:
            raise ValueError(f"a weight of {size} bytes is larger than the store")
        base = self._buffer.data_ptr()
        return [
            WeightHandle(base + i * stride, shape, self.dtype, self.home, self._buffer)
            for i in range(count)
        ]

    def tensors(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Return the same weights as tensors, for torch."""
        numbers = 1
        for extent in shape:
            numbers *= extent
        base = self._buffer.data_ptr()
        return [
            self._buffer[(w.pointer - base) // ITEM_BYTES :][:numbers].view(shape)
            for w in self.weights(shape)
        ]


def capture(
    context: LaunchContext, stream: torch.cuda.Stream, steps: Sequence[Step], *, warm: int = 3
) -> torch.cuda.CUDAGraph:
    """Capture steps, one after another, as a graph on the SMs of `stream`.

    The first `warm` steps run before, so that slots are allocated and cuBLAS has chosen its
    kernels. The graph holds addresses: operands must live as long as it does.
    """
    with torch.cuda.stream(stream):
        for step in steps[:warm]:
            step()
        torch.cuda.synchronize(context.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), no_collection():
            context.begin_capture()
            for step in steps:
                step()
            context.end_capture()
    return graph


@contextmanager
def no_collection() -> Generator[None]:
    """Stop garbage collection. If an old graph is collected during a capture, the capture fails."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def chain_s(context: LaunchContext, steps: Sequence[Step], *, at_least_s: float = 0.02) -> float:
    """Return the seconds of one step of a chain: the median over replays of its graph."""
    current = torch.cuda.current_stream(context.device)
    stream = torch.cuda.Stream(context.device) if current.cuda_stream == 0 else current
    stream.wait_stream(current)
    graph = capture(context, stream, steps)
    with torch.cuda.stream(stream):
        _replay_s(graph, stream)
        times: list[float] = []
        while len(times) < _REPLAYS_MIN or (sum(times) < at_least_s and len(times) < 200):
            times.append(_replay_s(graph, stream))
    return median(times) / len(steps)


def _replay_s(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_bytes_per_s(target: Tensor, source: Tensor, *, repeats: int = 5) -> float:
    """Return the rate of a copy engine between two buffers of one size."""
    stream = torch.cuda.current_stream()
    times: list[float] = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        size = source.numel() * source.element_size()
        driver.copy_async(target.data_ptr(), source.data_ptr(), size, stream.cuda_stream)
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return source.numel() * source.element_size() / median(times[1:])
