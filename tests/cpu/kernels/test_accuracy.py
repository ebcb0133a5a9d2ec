"""The native operators against float64 where blocking, splitting or the ends of ranges matter."""

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import EVERY_LEVEL, RUNNABLE, as_seen

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import KvLayout
from c2cserve.kernels.ref import RefOps

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REF = RefOps()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


@settings(max_examples=examples(40), deadline=None)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 80),
    k=st.sampled_from([1, 7, 15, 16, 17, 33, 500, 1024, 1100, 2049]),
    dtype=st.sampled_from(DTYPES),
    bias=st.sampled_from([None, *DTYPES]),
    isa=st.sampled_from(RUNNABLE),
    gap=st.integers(0, 5),
)
def test_linear_over_all_shapes(
    m: int, n: int, k: int, dtype: torch.dtype, bias: torch.dtype | None, isa: str, gap: int
) -> None:
    """Rows `gap` elements apart, outputs poisoned first, and nothing written beside them."""
    x, w = noise(m, k + gap, seed=m)[:, :k], noise(n, k + gap, seed=n).to(dtype)[:, :k]
    b = None if bias is None else noise(n, seed=k).to(bias)
    wide = torch.full((m, n + 3), torch.nan)
    CpuOps(2, isa=isa).linear(x, w, b, wide[:, :n])
    assert off(wide[:, :n], REF.linear(as_seen(isa, x, w), w, b)) < 4e-6
    assert wide[:, n:].isnan().all()


@pytest.mark.parametrize("isa", EVERY_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_router_sees_activations_as_they_are(isa: str, dtype: torch.dtype) -> None:
    """Also on levels that round them elsewhere; and a row's bits are its own."""
    x, router = noise(70, 300), noise(9, 300, seed=1).to(dtype)
    whole = CpuOps(2, isa=isa).router_logits(x, router)
    assert off(whole, REF.linear(x, router)) < 4e-6
    for row in (0, 8, 69):
        alone = CpuOps(1, isa=isa).router_logits(x[row : row + 1], router)
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("isa", EVERY_LEVEL)
@pytest.mark.parametrize("window", [0, 1500])
def test_attention_over_splits(isa: str, window: int) -> None:
    kv = KvLayout(1, 2, 40, "float32")
    blocks = 150
    arena = noise(blocks * kv.block_bytes // 4, seed=1).view(torch.uint8)
    table = (torch.randperm(blocks) * kv.block_bytes)[None]
    qkv = noise(5, (6 + 4) * 40, seed=2)
    where = (torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2390], dtype=torch.int32))
    got = CpuOps(3, isa=isa).attention(qkv, arena, kv, 0, *where, table, 0.5, window)
    want = REF.attention(qkv, arena, kv, 0, *where, table, 0.5, window)
    assert off(got, want) < 3e-6


@pytest.mark.parametrize("isa", EVERY_LEVEL)
def test_attention_with_scores_far_apart(isa: str) -> None:
    """Growing scores make the running peak move in every block."""
    kv = KvLayout(1, 1, 8, "float32")
    arena = torch.zeros(4 * kv.block_bytes, dtype=torch.uint8)
    planes = arena.view(torch.float32).view(4, 2, 8 * 16)
    for block in range(4):
        planes[block, 0].view(8, 16)[0] = torch.arange(block * 16, block * 16 + 16) * 7.0
        planes[block, 1] = noise(128, seed=block)
    qkv = torch.zeros(1, 3 * 8)
    for sign in (1.0, -1.0):
        qkv[0, 0] = sign
        where = (
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([64], dtype=torch.int32),
            (torch.arange(4) * kv.block_bytes)[None], 1.0, 0,
        )  # fmt: skip
        got = CpuOps(1, isa=isa).attention(qkv, arena, kv, 0, *where)
        assert off(got, REF.attention(qkv, arena, kv, 0, *where)) < 1e-6


@pytest.mark.parametrize("isa", EVERY_LEVEL)
def test_what_is_not_a_number_stays_one(isa: str) -> None:
    """A NaN must reach the logits, where it is reported; it must not be clamped away."""
    ops = CpuOps(1, isa=isa)
    x = torch.ones(2, 64)
    x[0, 3] = torch.nan
    assert ops.rms_norm(x, torch.ones(64), 1e-5).isnan().any(1).tolist() == [True, False]
    assert ops.linear(x, torch.ones(5, 64)).isnan().all(1).tolist() == [True, False]
    assert ops.silu_mul(x).isnan().any(1).tolist() == [True, False]
    kv = KvLayout(1, 1, 32, "float32")
    arena = torch.zeros(kv.block_bytes, dtype=torch.uint8)
    qkv = torch.ones(2, 96)
    qkv[0, 3] = torch.nan
    got = ops.attention(
        qkv, arena, kv, 0, torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int64), 1.0, 0,
    )  # fmt: skip
    assert got.isnan().all(1).tolist() == [True, False]


def test_instruction_sets_agree() -> None:
    x, w = noise(9, 700).bfloat16().float(), noise(50, 700, seed=1).bfloat16()
    outputs = [CpuOps(1, isa=isa).linear(x, w) for isa in RUNNABLE]
    for other in outputs[1:]:
        assert off(outputs[0], other) < 3e-6
