"""Numbers of rows that cuBLAS multiplies: few, and known before a prompt needs them.

For each number of rows of a matrix's shape, cuBLAS chooses kernels anew and loads those that it has
not used. That takes the host as long as the launch of many layers. So rows of long steps are padded
to a few numbers. When a model of a new shape is attached, the slice runs each GEMM of usual prompts
once:

    attached    | one GEMM | one GEMM | ...       while the slice has no request: one after another
    requests    | step | one GEMM | step | ...    else one in `_APART_S`, so no step waits for more

Longer prompts compute for many times as long as their GEMMs' first use takes. Tiles of cuBLAS have
64 rows or more in any case, so padding costs little.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from c2cserve.core.tensors import HalfDtype
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED
from c2cserve.kernels.gpu.gemm.linear import multiplied
from c2cserve.kernels.gpu.gemm.weight import ITEM_BYTES, TORCH_DTYPES

log = logging.getLogger(__name__)

_LONG = 1024
"""The count of rows from which on tiles of 128 rows lose little."""
_USUAL_MOST = 2048
"""Rows of the longest step whose GEMMs are run before it needs them."""
_APART_S = 0.05


class MatrixShape(NamedTuple):
    """All of a matrix that cuBLAS chooses kernels by, beside the number of rows."""

    n: int
    k: int
    dtype: HalfDtype
    biased: bool = False


def padded_rows(count: int) -> int:
    """Return how many rows a step of several new tokens a sequence is computed with."""
    if count <= ROWS_STREAMED:
        return count
    step = 64 if count <= _LONG else 128
    return -(-count // step) * step


def usual_rows() -> list[int]:
    """Return the numbers of rows that steps with prompts usually have, the largest first."""
    return sorted({padded_rows(count) for count in range(ROWS_STREAMED + 1, _USUAL_MOST + 1)})[::-1]


class FirstUses:
    """The GEMMs that cuBLAS has still to be shown, of a slice's models. Not thread-safe: they run
    on the slice's thread, in the order of its current stream."""

    def __init__(self, memory: Tensor, clock: Callable[[], float] = time.monotonic) -> None:
        """`memory`: uint8 on the GPU. It is read in place of weights, whatever it holds."""
        self._memory = memory
        self._clock = clock
        self._shapes: set[MatrixShape] = set()
        self._left: deque[tuple[int, MatrixShape]] = deque()
        self._last_s = float("-inf")
        self.done = 0
        """GEMMs that were run, for `/metrics`."""
        self.seconds = 0.0
        """Seconds of the slice's thread that they took."""

    def __bool__(self) -> bool:
        """Whether some are left."""
        return bool(self._left)

    def add(self, shapes: Iterable[MatrixShape]) -> None:
        """Add the matrices of a model, as far as there is none like them yet. Matrices that are
        larger than the memory are left out: they are not multiplied from there."""
        new = [
            one for one in dict.fromkeys(shapes)
            if one not in self._shapes and one.n * one.k * ITEM_BYTES <= self._memory.numel()
        ]  # fmt: skip
        self._shapes.update(new)
        # The largest first: what torch allocates for it serves all others, and prompts.
        self._left.extend((rows, shape) for rows in usual_rows() for shape in new)

    def go_on(self, *, idle: bool) -> bool:
        """Run one if it is time. Return whether the next one may follow at once.

        `idle`: the slice has no request.
        """
        began_s = self._clock()
        if not self._left or not (idle or began_s - self._last_s >= _APART_S):
            return False
        try:
            self._run(*self._left.popleft())
        except torch.OutOfMemoryError as error:
            log.warning("no memory to run GEMMs of prompts before prompts need them: %s", error)
            self._left.clear()
            return False
        self._last_s = self._clock()
        self.seconds += self._last_s - began_s
        self.done += 1
        if not self._left:
            log.info("cuBLAS has met %d GEMMs of prompts, which took %.2f s", self.done,
                     self.seconds)  # fmt: skip
        return idle and bool(self._left)

    def _run(self, rows: int, shape: MatrixShape) -> None:
        n, k, dtype = shape.n, shape.k, TORCH_DTYPES[shape.dtype]
        transposed = self._memory[: n * k * ITEM_BYTES].view(dtype).view(n, k).t()
        x = torch.empty(rows, k, dtype=dtype, device=self._memory.device)
        bias = x.new_empty(n) if shape.biased else None
        multiplied(x, transposed, bias)
