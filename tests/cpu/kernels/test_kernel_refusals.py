"""What does not fit is refused with a sentence, before anything is written."""

import pytest
import torch

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import KvLayout
from c2cserve.kernels.ops import RowSampling

KV = KvLayout(2, 2, 8, "bfloat16")


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(1)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def longs(*values: int) -> torch.Tensor:
    return ints(*values, dtype=torch.int64)


def arena(blocks: int = 2) -> torch.Tensor:
    return torch.zeros(blocks * KV.block_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("ids", [(5,), (0, -1)])
def test_embed_ids_outside_of_the_table(ops: CpuOps, ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"id {ids[-1]} at {len(ids) - 1} is not in \[0, 5\)"):
        ops.embed(torch.zeros(5, 8), ints(*ids))


@pytest.mark.parametrize(
    ("x", "w", "bias"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 9), None),
        (torch.zeros(2, 8).double(), torch.zeros(4, 8), None),
        (torch.zeros(2, 8), torch.zeros(8, 4).T, None),
        (torch.zeros(8, 2).T, torch.zeros(4, 8), None),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(5)),
        (torch.zeros(2, 0), torch.zeros(4, 0), None),
    ],
)
def test_linear(ops: CpuOps, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="linear: these do not fit"):
        ops.linear(x, w, bias)


def test_linear_into_what_is_not_its_output(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        ops.linear(torch.zeros(2, 8), torch.zeros(4, 8), None, torch.zeros(2, 5))


def test_rows_that_are_not_dense(ops: CpuOps) -> None:
    x = torch.zeros(4, 8)[:, :4]
    with pytest.raises(ValueError, match="rms_norm"):
        ops.rms_norm(x, torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match="add_rms_norm"):
        ops.add_rms_norm(torch.zeros(4, 4), x, torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match="silu_mul"):
        ops.silu_mul(x)
    with pytest.raises(ValueError, match="rms_norm"):
        ops.rms_norm(torch.zeros(4, 4), torch.zeros(4).half(), 1e-5)


@pytest.mark.parametrize(
    ("position", "slot"), [(3, 0), (-1, 0), (0, -1), (0, (KV.block_bytes + 1) * 16)]
)
def test_rope_store_outside_of_its_tables_or_arena(ops: CpuOps, position: int, slot: int) -> None:
    qkv, memory = torch.ones(1, 48), arena()
    table = torch.ones(3, 4)
    with pytest.raises(ValueError, match="token 0 has position"):
        ops.rope_store(qkv, ints(position), table, table, None, 1e-6, memory, KV, 0, longs(slot))
    assert (qkv == 1).all()
    assert not memory.any()


@pytest.mark.parametrize(
    ("starts", "context", "table"),
    [
        ((0, 1), 1, [[KV.block_bytes + 1]]),
        ((0, 1), 1, [[-16]]),
        ((0, 1), 17, [[0]]),
        ((0, 2), 1, [[0]]),
        ((1, 1), 1, [[0]]),
        ((0, 0), 1, [[0]]),
    ],
)
def test_attention_outside_of_its_arena_or_rows(
    ops: CpuOps, starts: tuple[int, ...], context: int, table: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="attention: sequence 0"):
        ops.attention(
            torch.ones(1, 48), arena(), KV, 0, ints(*starts), ints(context), torch.tensor(table),
            1.0, 0,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "layer", "kv"),
    [(40, 0, KV), (50, 0, KV), (48, 2, KV), (3072, 0, KvLayout(1, 1, 1024, "float32"))],
)
def test_attention_of_rows_that_are_not_heads(
    ops: CpuOps, width: int, layer: int, kv: KvLayout
) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        ops.attention(
            torch.ones(1, width), arena(), kv, layer, ints(0, 1), ints(1), longs(0)[None], 1.0, 0
        )


@pytest.mark.parametrize("ids", [(0, 4), (-1, 0), (2, 2)])
def test_experts_that_are_none_or_chosen_twice(ops: CpuOps, ids: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no expert of 4, or chosen twice"):
        ops.moe_experts(
            torch.ones(1, 8), ints(*ids)[None], torch.ones(1, 2), torch.ones(4, 12, 8),
            torch.ones(4, 8, 6),
        )  # fmt: skip


def test_routing_to_more_experts_than_there_are(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="moe_route of 5"):
        ops.moe_route(torch.ones(1, 4), 5, True)


@pytest.mark.parametrize("name", ["prompt", "output", "banned"])
def test_sampling_histories_outside_of_the_vocabulary(ops: CpuOps, name: str) -> None:
    row = RowSampling(1, 0, **{name: ints(3, 50)})
    with pytest.raises(ValueError, match="row 1 names token ids"):
        ops.sample(torch.zeros(2, 50), [RowSampling(1, 0), row])


def test_sampling_parameters_that_do_not_match(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="sample for 1 rows"):
        ops.sample(torch.zeros(2, 50), [RowSampling(1, 0)])
    bias = RowSampling(1, 0, bias_ids=ints(3), bias=torch.ones(2))
    with pytest.raises(ValueError, match="1 bias ids and 2 values"):
        ops.sample(torch.zeros(1, 50), [bias])
    with pytest.raises(ValueError, match="int32"):
        ops.sample(torch.zeros(1, 50), [RowSampling(1, 0, prompt=longs(3))])


@pytest.mark.parametrize("threads", [0, 1025])
def test_thread_counts(threads: int) -> None:
    with pytest.raises(ValueError, match="threads must be 1 to"):
        CpuOps(threads)
