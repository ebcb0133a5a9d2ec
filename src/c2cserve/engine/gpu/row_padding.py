"""Rows of long steps are padded, so that cuBLAS meets few numbers of them.

For each new number of rows cuBLAS chooses kernels anew. That takes the host about as long as it
takes to launch 32 layers. Lengths of prompts hardly repeat, so without padding most prompts would
pay for it (`benchmarks/step_launch.py`, its new lengths). cuBLAS computes tiles of 64 rows or more
in any case.

Nobody reads what padding rows compute. Attention leaves them out, and experts are not chosen for
them.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from c2cserve.engine.gpu.layers import GpuLayer
from c2cserve.engine.gpu.tables import Rope
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED
from c2cserve.kernels.layer import TokenRows

Launch = Callable[[Tensor, Sequence[GpuLayer], TokenRows, Rope, Tensor], Tensor]
"""Launches layers over hidden, rows, rotary tables and arena. Returns the last one's branch."""

_LONG = 1024
"""From here on, tiles of 128 rows lose little."""


def padded_rows(count: int) -> int:
    """Return how many rows a step of several new tokens a sequence is computed with."""
    if count <= ROWS_STREAMED:
        return count
    step = 64 if count <= _LONG else 128
    return -(-count // step) * step


def run_padded(
    launch: Launch, hidden: Tensor, layers: Sequence[GpuLayer], rows: TokenRows,
    rope: Rope, arena: Tensor,
) -> None:  # fmt: skip
    """Run layers in place: `hidden` [T, H] becomes the last layer's output. Raises as `launch`."""
    count = len(hidden)
    padded = padded_rows(count)
    if padded == count:
        hidden += launch(hidden, layers, rows, rope, arena)
        return
    wide = hidden.new_empty((padded, hidden.shape[1]))
    wide[:count] = hidden
    wide[count:].zero_()
    branch = launch(wide, layers, rows, rope, arena)
    hidden.copy_(wide[:count]).add_(branch[:count])
