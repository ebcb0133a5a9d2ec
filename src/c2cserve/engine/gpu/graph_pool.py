"""Memory that the graphs of a slice share between their kernels, and their capture into it.

torch gives a pool up with the last graph in it, and refuses to capture into it from then on
(`use_count > 0` fails in its allocators). For GPU memory the pool here has an owner besides its
graphs, but for pinned host memory torch has no such thing. So a pool without graphs is not used
again. That of a first capture that failed is one.

A capture that CUDA gives up leaves torch's two allocators recording into the pool, that of GPU
memory and that of pinned host memory. Both forget to stop where `cudaStreamEndCapture` fails. The
first can be made to stop. The second cannot: it goes on asking the graph whether an allocation
belongs to it. So the graph is kept for good, and later captures get another pool.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch

from c2cserve.kernels.gpu.gemm.measure import no_collection

_Result = TypeVar("_Result")


class CaptureError(RuntimeError):
    """A graph could not be captured; nothing ran, and the next one may be tried."""


@dataclass(frozen=True, slots=True)
class Captured(Generic[_Result]):
    """A graph, and what the captured code returned."""

    # In this order: slots are released one after another, and a pool goes after its graphs.
    graph: torch.cuda.CUDAGraph
    result: _Result
    pool: object


_abandoned: list[object] = []
"""Graphs whose capture CUDA gave up, of all slices of the process."""


class GraphPool:
    """The memory of one slice's graphs, of which no two run at once. It belongs to the slice's
    thread."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Those in the pool that are left."""

    def capture(self, launch: Callable[[], _Result]) -> Captured[_Result]:
        """Capture what `launch` puts on the current stream. Raises `CaptureError`."""
        if self._pool is None or not self._graphs:
            self._pool, self._graphs = torch.cuda.MemPool(), WeakSet()
        pool, graph = self._pool, torch.cuda.CUDAGraph()
        with no_collection():
            try:
                # Other slices' threads go on meanwhile: what they call is theirs.
                graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
            except RuntimeError as error:
                raise self._abandon(graph, error) from error
            try:
                result = launch()
            except BaseException as error:
                self._end(graph)
                if isinstance(error, RuntimeError):
                    raise CaptureError(f"{type(error).__name__}: {error}") from error
                raise
            self._end(graph)
        self._graphs.add(graph)
        return Captured(graph, result, pool)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture, whatever came of it. Raises `CaptureError`."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            raise self._abandon(graph, error) from error

    def _abandon(self, graph: torch.cuda.CUDAGraph, error: RuntimeError) -> CaptureError:
        """Leave a failed capture and its pool behind; return the error to raise."""
        pool, self._pool = self._pool, None
        _abandoned.append((graph, pool))
        allocator: Any = import_module("torch._C")
        with suppress(RuntimeError):  # it is not recording
            allocator._cuda_endAllocateToPool(torch.cuda.current_device(), pool.id)
        return CaptureError(f"{type(error).__name__}: {error}")
