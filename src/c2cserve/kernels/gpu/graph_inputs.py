"""The rows of a decode step at the addresses, and in the number, that its graph was captured with.

    step     row 0 | row 1 | row 2
    graph    row 0 | row 1 | row 2 | padding: row 0 with an empty context

A graph may have more rows than the step. The rest is padding, whose results are not read. With an
empty context, attention reads and stores nothing for a row, and its output there is undefined.

If the experts of a mixture stream over a link, padding repeats row 0 with its context instead. Then
padding chooses the same experts as row 0, and no others have to be read.
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.launcher import Launcher
from c2cserve.kernels.gpu.programmatic_launch import after_others
from c2cserve.kernels.layer import BLOCK_TOKENS, TokenRows

_COLUMNS = 1024
"""The part of a row that one program copies."""


@triton.jit(do_not_specialize=["rows", "table_width", "graph_width", "repeated"])
def _copy_in_kernel(
    hidden, positions, context_len, tables, slots, graph_hidden, graph_positions,
    graph_context_len, graph_tables, graph_slots, rows, width, table_width, graph_width,
    repeated, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    target = tl.program_id(0).to(tl.int64)
    source = tl.where(target < rows, target, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(hidden + source * width + at, at < width)
    tl.store(graph_hidden + target * width + at, value, at < width)
    block = tl.load(tables + source * table_width + at, at < table_width, 0)
    tl.store(graph_tables + target * graph_width + at, block, at < graph_width)
    if tl.program_id(1) == 0:
        tl.store(graph_positions + target, tl.load(positions + source))
        attends = (target < rows) | (repeated != 0)
        tl.store(graph_context_len + target, tl.where(attends, tl.load(context_len + source), 0))
        tl.store(graph_slots + target, tl.load(slots + source))


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """What a graph reads: `hidden` [rows, H], and as many sequences of one new token."""

    hidden: Tensor
    rows: TokenRows

    @classmethod
    def make(
        cls, count: int, width: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> "GraphInputs":
        """Allocate inputs for `count` sequences of up to `context` tokens. `copy_in` fills them."""

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rows = TokenRows(
            positions=empty(count, dtype=torch.int32),
            q_start=torch.arange(count + 1, dtype=torch.int32, device=device),
            context_len=empty(count, dtype=torch.int32),
            block_table=empty(count, -(-context // BLOCK_TOKENS), dtype=torch.int64),
            slots=empty(count, dtype=torch.int64),
        )
        return cls(empty(count, width, dtype=dtype), rows)

    def copy_in(self, hidden: Tensor, rows: TokenRows, *, repeated: bool = False) -> None:
        """Copy a step's rows in. They are contiguous and on this GPU.

        The step has at most as many rows as the graph, and its block tables are at most as wide.
        With `repeated`, padding has the first row's context, too.
        """
        (count, width), mine = self.hidden.shape, self.rows
        longest = max(width, mine.block_table.shape[1])
        tensors = (
            hidden, rows.positions, rows.context_len, rows.block_table, rows.slots, self.hidden,
            mine.positions, mine.context_len, mine.block_table, mine.slots,
        )  # fmt: skip
        numbers = (
            len(hidden), width, rows.block_table.shape[1], mine.block_table.shape[1], int(repeated)
        )  # fmt: skip
        grid = count, -(-longest // _COLUMNS), 1
        _launch_copy_in(grid, tensors, numbers, (hidden.dtype, width))


def _constants(_dtype: torch.dtype, _width: int) -> dict[str, Any]:
    return {"BLOCK": _COLUMNS, "num_warps": 4}


_launch_copy_in = Launcher(_copy_in_kernel, _constants)
