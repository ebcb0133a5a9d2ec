"""A row's bits never depend on its batch, its chunking, its place or the number of threads."""

import ctypes
import os

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import EVERY_LEVEL, RUNNABLE

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import KvLayout
from c2cserve.kernels.ops import RowSampling

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=EVERY_LEVEL, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[CpuOps, CpuOps]:
    """The same kernels on one thread and on three."""
    return CpuOps(1, isa=request.param), CpuOps(3, isa=request.param)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(25), deadline=None)
@given(
    m=st.integers(1, 150),
    n=st.integers(1, 60),
    k=st.sampled_from([1, 31, 32, 1023, 1024, 1056, 2600]),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(RUNNABLE),
    data=st.data(),
)
def test_linear_blocks_of_any_size_agree(
    m: int, n: int, k: int, dtype: torch.dtype, isa: str, data: st.DataObject
) -> None:
    x, w, bias = noise(m, k, seed=m), noise(n, k, seed=n).to(dtype), noise(n, seed=k).to(dtype)
    one, three = CpuOps(1, isa=isa), CpuOps(3, isa=isa)
    whole = three.linear(x, w, bias)
    begin = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(begin + 1, m))
    assert torch.equal(one.linear(x[begin:end], w, bias), whole[begin:end])
    assert torch.equal(one.linear(x[begin : begin + 1], w, bias)[0], whole[begin])
    column = data.draw(st.integers(0, n - 1))
    alone = one.linear(x, w[column : column + 1], bias[column : column + 1])
    assert torch.equal(alone[:, 0], whole[:, column])


def test_rowwise_operators(pair: tuple[CpuOps, CpuOps]) -> None:
    one, three = pair
    x, weight = noise(97, 600), noise(600, seed=1)
    norm, act = three.rms_norm(x, weight, 1e-5), three.silu_mul(x)
    table, ids = noise(97, 600, seed=2).half(), torch.arange(97, dtype=torch.int32)
    embedded = three.embed(table, ids)
    for t in (0, 31, 96):
        assert torch.equal(one.rms_norm(x[t : t + 1], weight, 1e-5)[0], norm[t])
        assert torch.equal(one.silu_mul(x[t : t + 1])[0], act[t])
        assert torch.equal(one.embed(table, ids[t : t + 1])[0], embedded[t])


def test_moe_with_many_tokens(pair: tuple[CpuOps, CpuOps]) -> None:
    one, three = pair
    x, router = noise(120, 72), noise(120, 37, seed=1)
    w13, w2 = noise(37, 96, 72, seed=2).bfloat16(), noise(37, 72, 48, seed=3).bfloat16()
    ids, weights = three.moe_route(router, 4, True)
    whole = three.moe_experts(x, ids, weights, w13, w2)
    for t in (0, 60, 119):
        alone_ids, alone_weights = one.moe_route(router[t : t + 1], 4, True)
        assert torch.equal(alone_ids[0], ids[t])
        assert torch.equal(alone_weights[0], weights[t])
        alone = one.moe_experts(x[t : t + 1], alone_ids, alone_weights, w13, w2)
        assert torch.equal(alone[0], whole[t])


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (40, 2), (4, 4)])
def test_long_contexts_in_splits(
    pair: tuple[CpuOps, CpuOps], heads: int, kv_heads: int, window: int
) -> None:
    """One thread walks all splits of a row; several share them and merge: the same bits."""
    one, three = pair
    kv = KvLayout(1, kv_heads, 24, "bfloat16")
    lengths = [3000, 1024, 1025, 7]
    blocks = [-(-n // 16) for n in lengths]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1))
    offsets = (order * kv.block_bytes).split(blocks)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    for row, part in zip(table, offsets, strict=True):
        row[: len(part)] = part
    values = noise(sum(blocks) * kv.block_bytes // 2, seed=2).bfloat16()
    arena = values.view(torch.uint8)
    q = noise(len(lengths) * 3, (heads + 2 * kv_heads) * 24, seed=3)
    starts = torch.arange(0, 3 * len(lengths) + 1, 3, dtype=torch.int32)
    context = torch.tensor(lengths, dtype=torch.int32)
    whole = three.attention(q, arena, kv, 0, starts, context, table, 0.2, window)
    for s, length in enumerate(lengths):
        for i, ops in ((2, one), (1, three)):  # the last new token, then the one before, alone
            alone = ops.attention(
                q[3 * s + i][None], arena, kv, 0, torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([length - 2 + i], dtype=torch.int32), table[s : s + 1], 0.2, window,
            )  # fmt: skip
            assert torch.equal(alone[0], whole[3 * s + i])


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 9), data=st.data())
def test_draws_depend_on_their_row_alone(count: int, data: st.DataObject) -> None:
    logits = noise(count, 5000, seed=count) * 3
    how = st.builds(
        RowSampling,
        seed=st.integers(-(2**63), 2**64 - 1),
        position=st.integers(0, 2**40),
        temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        top_p=st.sampled_from([1.0, 0.9, 0.1]),
        top_k=st.sampled_from([0, 1, 40]),
        min_p=st.sampled_from([0.0, 0.05]),
        top_logprobs=st.sampled_from([-1, 0, 3]),
    )
    rows = [data.draw(how) for _ in range(count)]
    whole = CpuOps(2).sample(logits, rows)
    at = data.draw(st.integers(0, count - 1))
    alone = CpuOps(1).sample(logits[at : at + 1], [rows[at]])
    assert alone.ids[0] == whole.ids[at]
    assert alone.logprobs[0] == whole.logprobs[at]
    assert (alone.top or [[]])[0] == (whole.top or [[]] * count)[at]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine lends one CPU")
def test_a_caller_leaves_the_cpu_of_its_helper() -> None:
    """Threads that share a CPU while another is idle take twice the time."""
    allowed = os.sched_getaffinity(0)
    own, helpers = sorted(allowed)[:2]
    ops, w = CpuOps(2, (own, helpers)), torch.ones(256, 1024)
    seen: set[int] = set()
    try:
        for _ in range(20):
            os.sched_setaffinity(0, {helpers})
            os.sched_setaffinity(0, allowed)
            ops.linear(torch.ones(1, 1024), w)
            seen.add(ctypes.CDLL(None).sched_getcpu())
            assert os.sched_getaffinity(0) == allowed
    finally:
        os.sched_setaffinity(0, allowed)
    assert own in seen
