"""Memory that the graphs of a slice share between their kernels, and their capture into it.

torch gives a pool up with the last graph in it, and refuses to capture into it from then on
(`use_count > 0` fails in its allocator). So the pool here has an owner besides its graphs. A
capture that fails leaves the allocator as it was.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch

from c2cserve.kernels.gpu.measure import no_collection

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


class GraphPool:
    """One per slice: no two graphs of a slice run at once. Belongs to its thread."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, launch: Callable[[], _Result]) -> Captured[_Result]:
        """Capture what `launch` puts on the current stream. Raises `CaptureError`."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        pool, graph = self._pool, torch.cuda.CUDAGraph()
        users = pool.use_count()
        with no_collection():
            try:
                # Other slices' threads go on meanwhile: what they call is theirs.
                graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
                try:
                    result = launch()
                finally:
                    graph.capture_end()
            except RuntimeError as error:
                _restore(pool, graph, users)
                raise CaptureError(f"{type(error).__name__}: {error}") from error
        return Captured(graph, result, pool)


def _restore(pool: Any, graph: torch.cuda.CUDAGraph, users: int) -> None:
    """Undo a capture that failed: torch 2.11 leaves its allocator recording, and the pool counted,
    where the capture does not end well."""
    allocator: Any = import_module("torch._C")
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # it is not recording any more
        allocator._cuda_endAllocateToPool(device, pool.id)
    graph.reset()
    while pool.use_count() > users:
        allocator._cuda_releasePool(device, pool.id)
