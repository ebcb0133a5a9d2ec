"""What goes to the GPU in one piece."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from c2cserve.engine.gpu.staging import Packing
from c2cserve.engine.models.decoder import ForwardBatch


def batch(tokens: int, seqs: int, blocks: int, wanted: int) -> ForwardBatch:
    """Return a batch in which no two numbers are equal. No sizes need to fit each other here."""
    shapes = {
        "positions": (tokens,), "q_start": (seqs + 1,), "context_len": (seqs,), "ids": (tokens,),
        "block_table": (seqs, blocks), "slots": (tokens,), "logit_rows": (wanted,),
    }  # fmt: skip
    made: dict[str, Tensor] = {}
    begin = 1
    for name, shape in shapes.items():
        size = int(torch.Size(shape).numel())
        wide = name in {"block_table", "slots", "logit_rows"}
        values = torch.arange(begin, begin + size) * ((1 << 40) + 1 if wide else 1)
        made[name] = values.to(torch.int64 if wide else torch.int32).view(shape)
        begin += size
    return ForwardBatch(**made, longest=blocks)


@pytest.mark.parametrize(
    ("tokens", "seqs", "blocks", "wanted"),
    [(1, 1, 1, 1), (1, 1, 1, 0), (5, 3, 7, 2), (2, 2, 0, 2), (300, 4, 33, 4), (8, 8, 64, 8)],
)
def test_what_is_packed_is_what_is_unpacked(
    tokens: int, seqs: int, blocks: int, wanted: int
) -> None:
    given = batch(tokens, seqs, blocks, wanted)
    packing = Packing(given)
    memory = torch.full((packing.words,), -1, dtype=torch.int32)
    packing.fill(memory)
    found = packing.unpack(memory)
    moved = {field.name for field in fields(ForwardBatch)} - {"longest", "host"}
    assert set(found) == moved
    for name, tensor in found.items():
        want: Tensor = getattr(given, name)
        assert tensor.dtype == want.dtype, name
        assert torch.equal(tensor, want), name
        assert not tensor.numel() or (tensor.data_ptr() - memory.data_ptr()) % 16 == 0, name
        assert tensor.is_contiguous(), name
