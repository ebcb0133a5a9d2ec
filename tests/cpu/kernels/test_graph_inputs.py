"""Rows of a step where a graph has them."""

import pytest
import torch
from interpreted import DEVICE
from triton_case import noise

from c2cserve.kernels.gpu.graph_inputs import GraphInputs
from c2cserve.kernels.layer import TokenRows


@pytest.mark.parametrize("repeated", [False, True])
def test_rows_are_copied_and_those_that_are_not_there_begin_as_the_first(repeated: bool) -> None:
    """They have no context, so that attention passes them by, unless they repeat it to the end."""
    fixed = GraphInputs.make(4, 1040, 160, torch.bfloat16, DEVICE)
    fixed.hidden.fill_(torch.nan)
    fixed.rows.block_table.fill_(-1)
    hidden = noise(3, 1040).bfloat16().to(DEVICE)
    rows = TokenRows(
        positions=torch.tensor([5, 17, 2], dtype=torch.int32, device=DEVICE),
        q_start=torch.arange(4, dtype=torch.int32, device=DEVICE),
        context_len=torch.tensor([6, 18, 3], dtype=torch.int32, device=DEVICE),
        block_table=torch.tensor([[1, 0], [4, 1 << 40], [2, 0]], device=DEVICE),
        slots=torch.tensor([21, (1 << 44) + 1, 34], device=DEVICE),
    )
    fixed.copy_in(hidden, rows, repeated=repeated)
    order = [0, 1, 2, 0]
    assert torch.equal(fixed.hidden, hidden[order])
    assert fixed.rows.context_len.tolist() == [6, 18, 3, 6 if repeated else 0]
    for name in ("positions", "slots"):
        assert torch.equal(getattr(fixed.rows, name), getattr(rows, name)[order]), name
    assert torch.equal(fixed.rows.block_table[:, :2], rows.block_table[order])
    assert fixed.rows.block_table.shape == (4, 10)
    assert not fixed.rows.block_table[:, 2:].any()
    assert fixed.rows.q_start.tolist() == [0, 1, 2, 3, 4]
