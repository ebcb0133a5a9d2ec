"""Rows of a decode step where a graph has them: at fixed addresses, as many as it was captured for.

Rows that are not there begin as the first one does, and no result of theirs is read. Their context
is of no token, so attention neither reads nor stores anything for them, and what it leaves in their
rows is not defined. Where a mixture of experts streams from afar they repeat the first row to the
end instead: they choose the experts it chooses, and no others have to come.
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
"""A program's share of a row."""


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
    """What a graph reads: `hidden` [rows, H], and the same number of sequences of one new token."""

    hidden: Tensor
    rows: TokenRows

    @classmethod
    def make(
        cls, count: int, width: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> "GraphInputs":
        """Make room for `count` sequences of up to `context` tokens; `copy_in` writes all of it."""

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
        """Bring a step's rows here: at most as many, with block tables at most as wide, all on this
        GPU and contiguous. `repeated`: the others repeat the first one, attention included."""
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
