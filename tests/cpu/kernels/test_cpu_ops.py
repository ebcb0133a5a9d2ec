"""The native operators against float64, over odd shapes, and bit for bit against themselves."""

import math
from itertools import pairwise

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import EVERY_LEVEL, as_seen, rounds

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import KvLayout
from c2cserve.kernels.ops import RowSampling
from c2cserve.kernels.ref import RefOps

REF = RefOps()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=EVERY_LEVEL, scope="module")
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(2, isa=request.param)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-6) -> None:
    scale = want.abs().max().clamp(min=1e-6)
    assert not got.isnan().any()
    assert ((got - want).abs().max() / scale) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 7, 5), (2, 33, 72), (5, 130, 65), (33, 17, 129), (70, 48, 200), (1, 999, 512)],
)
def test_linear(ops: CpuOps, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    x, w, bias = noise(m, k), noise(n, k, seed=1).to(dtype), noise(n, seed=2)
    for b in (None, bias):
        out = torch.full((m, n), torch.nan)
        close(ops.linear(x, w, b, out), REF.linear(as_seen(ops.isa, x, w), w, b))


def test_linear_takes_rows_of_a_wider_matrix(ops: CpuOps) -> None:
    wide, w = noise(9, 100), noise(40, 80, seed=1).bfloat16()
    x, part = wide[:, :64], w[:, :64]
    close(ops.linear(x, part), REF.linear(as_seen(ops.isa, x, part), part))


def test_linear_refuses_shapes_that_do_not_fit(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        ops.linear(noise(2, 8), noise(4, 9))


@settings(max_examples=examples(40), deadline=None)
@given(m=st.integers(1, 70), n=st.integers(1, 90), k=st.integers(1, 300), data=st.data())
def test_a_row_of_linear_does_not_depend_on_its_batch(
    m: int, n: int, k: int, data: st.DataObject
) -> None:
    x, w = noise(m, k, seed=m), noise(n, k, seed=n).bfloat16()
    whole = CpuOps(2).linear(x, w)
    begin = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(begin + 1, m))
    assert torch.equal(CpuOps(1).linear(x[begin:end], w), whole[begin:end])


@pytest.mark.parametrize("k", [96, 2048])  # rows of the latter share a set of a cache
def test_few_rows_and_more_have_the_bits_of_each_alone(ops: CpuOps, k: int) -> None:
    """Where streams of weights end, and tiles of rows begin: after 4, 6 or 9 rows of x."""
    x, w, bias = noise(11, k), (noise(2 * 50, k, seed=1) / k**0.5).bfloat16(), noise(100, seed=2)
    alone = torch.cat([ops.linear(x[i : i + 1], w, bias) for i in range(11)])
    for m in range(2, 12):
        assert torch.equal(ops.linear(x[:m], w, bias), alone[:m])
        assert torch.equal(ops.gated(x[:m], w, bias), ops.silu_mul(alone[:m]))


@pytest.mark.parametrize("hidden", [1, 8, 24, 72, 100, 256])
def test_norms_embedding_and_activation(ops: CpuOps, hidden: int) -> None:
    x, weight = noise(5, hidden) * 3, noise(hidden, seed=1)
    close(ops.rms_norm(x, weight, 1e-5), REF.rms_norm(x, weight, 1e-5))
    mine, truth = noise(5, hidden, seed=2), noise(5, hidden, seed=2)
    close(ops.add_rms_norm(x, mine, weight, 1e-6), REF.add_rms_norm(x, truth, weight, 1e-6))
    assert torch.equal(mine, truth)
    gate_up = noise(5, 2 * hidden, seed=3) * 8
    close(ops.silu_mul(gate_up), REF.silu_mul(gate_up))
    ids = torch.tensor([3, 0, 3], dtype=torch.int32)
    for dtype in DTYPES:
        table = noise(6, hidden, seed=4).to(dtype)
        assert torch.equal(ops.embed(table, ids), REF.embed(table, ids))


def test_silu_holds_at_the_ends_of_the_range(ops: CpuOps) -> None:
    gate = torch.tensor([[-200.0, -90, -20, -1e-6, 0, 1e-6, 20, 90, 200, 1e30]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), 1)
    got, want = ops.silu_mul(gate_up), REF.silu_mul(gate_up)
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-35)


class Cache:
    """A paged cache with scattered blocks, filled through `rope_store` in any chunking."""

    def __init__(self, kv: KvLayout, heads: int, lengths: list[int], seed: int = 0) -> None:
        self.kv, self.heads, self.lengths = kv, heads, lengths
        width = (heads + 2 * kv.kv_heads) * kv.head_dim
        self.qkv = [noise(n, width, seed=seed + i) for i, n in enumerate(lengths)]
        blocks = [-(-n // 16) for n in lengths]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed))
        offsets = (order * kv.block_bytes).tolist()
        self.table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int64)
        for s, count in enumerate(blocks):
            self.table[s, :count] = torch.tensor([offsets.pop() for _ in range(count)])
        self.arena = torch.full((sum(blocks) * kv.block_bytes,), 0xFF, dtype=torch.uint8)
        angles = torch.outer(torch.arange(max(lengths)), 0.5 ** torch.arange(kv.head_dim // 2))
        self.cos, self.sin = angles.cos(), angles.sin()

    def step(
        self,
        ops: CpuOps | RefOps,
        spans: dict[int, tuple[int, int]],
        window: int = 0,
        layer: int = 1,
    ) -> dict[int, torch.Tensor]:
        """Run tokens [begin, end) of some sequences in one ragged batch."""
        rows, positions, slots, starts, context = [], [], [], [0], []
        for s, (begin, end) in spans.items():
            rows.append(self.qkv[s][begin:end].clone())
            positions += range(begin, end)
            slots += [int(self.table[s, t // 16]) * 16 + t % 16 for t in range(begin, end)]
            starts.append(len(positions))
            context.append(end)
        qkv = torch.cat(rows)
        norms = (noise(self.kv.head_dim, seed=91), noise(self.kv.head_dim, seed=92))
        at = torch.tensor(positions, dtype=torch.int32)
        ops.rope_store(
            qkv, at, self.cos, self.sin, norms, 1e-6, self.arena, self.kv, layer,
            torch.tensor(slots),
        )  # fmt: skip
        out = ops.attention(
            qkv, self.arena, self.kv, layer, torch.tensor(starts, dtype=torch.int32),
            torch.tensor(context, dtype=torch.int32), self.table[list(spans)], 0.3, window,
        )  # fmt: skip
        return {s: out[a:b] for s, (a, b) in zip(spans, pairwise(starts), strict=True)}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "inner", "k"), [(1, 50, 40), (5, 28, 33), (70, 60, 1100)])
def test_gated(
    ops: CpuOps, m: int, inner: int, k: int, dtype: torch.dtype, *, biased: bool
) -> None:
    x, w = noise(m, k), (noise(2 * inner, k, seed=1) / k**0.5).to(dtype)
    bias = noise(2 * inner, seed=2).to(dtype) if biased else None
    got = ops.gated(x, w, bias)
    assert torch.equal(got, ops.silu_mul(ops.linear(x, w, bias)))
    close(got, REF.gated(as_seen(ops.isa, x, w), w, bias), 4e-6)


def test_gated_refuses_shapes_that_do_not_fit(ops: CpuOps) -> None:
    for rows, columns, biases in ((7, 8, 7), (8, 9, 8), (8, 8, 4)):
        with pytest.raises(ValueError, match="do not fit"):
            ops.gated(noise(2, 8), noise(rows, columns), noise(biases))


def test_chained(ops: CpuOps) -> None:
    ids = torch.tensor([4, -1, 0, -3, 2], dtype=torch.int32)
    drawn = torch.tensor([70, 71, -1], dtype=torch.int32)
    assert ops.chained(ids, drawn).tolist() == [4, 70, 0, -1, 2]
    assert ops.chained(ids, drawn).dtype is torch.int32


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 24), (6, 2, 64), (5, 1, 8), (40, 2, 16)]
)
def test_attention(
    ops: CpuOps, heads: int, kv_heads: int, dim: int, dtype: str, window: int
) -> None:
    kv = KvLayout(2, kv_heads, dim, dtype)
    lengths = [1, 16, 37, 90]
    mine, truth = Cache(kv, heads, lengths), Cache(kv, heads, lengths)
    whole = {s: (0, n) for s, n in enumerate(lengths)}
    got, want = mine.step(ops, whole, window), truth.step(REF, whole, window)
    # The cache holds rounded keys: one rounding step apart, where float32 and float64 disagree.
    # Where a cache in bfloat16 meets bf16 units, queries and weights are rounded, too.
    tolerance = 3e-6 if dtype == "float32" else 2e-3
    if dtype == "bfloat16" and rounds(ops.isa, torch.bfloat16):
        tolerance = 2.0**-7
    for s in whole:
        close(got[s], want[s], tolerance)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), threads=st.integers(1, 2), window=st.sampled_from([0, 9]))
def test_attention_does_not_depend_on_chunking_or_batch(
    data: st.DataObject, threads: int, window: int
) -> None:
    kv = KvLayout(2, 2, 24, "bfloat16")
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    whole = Cache(kv, 6, lengths).step(
        CpuOps(2), {s: (0, n) for s, n in enumerate(lengths)}, window
    )
    cache, done = Cache(kv, 6, lengths), dict.fromkeys(range(len(lengths)), 0)
    ops = CpuOps(threads)
    while left := [s for s in done if done[s] < lengths[s]]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        spans = {s: (done[s], data.draw(st.integers(done[s] + 1, lengths[s]))) for s in chosen}
        for s, out in cache.step(ops, spans, window).items():
            begin, end = spans[s]
            assert torch.equal(out, whole[s][begin:end])
            done[s] = end


@pytest.mark.parametrize("renormalize", [True, False])
def test_moe(ops: CpuOps, renormalize: bool) -> None:
    x, router = noise(9, 40), noise(9, 6, seed=1)
    router[0] = 1.0  # ties go to the lower index
    w13, w2 = noise(6, 28, 40, seed=2).bfloat16(), noise(6, 40, 14, seed=3).bfloat16()
    ids, weights = ops.moe_route(router, 3, renormalize)
    true_ids, true_weights = REF.moe_route(router, 3, renormalize)
    assert torch.equal(ids, true_ids)
    close(weights, true_weights)
    whole = ops.moe_experts(x, ids, weights, w13, w2)
    # Between its two matrices, an expert rounds what the reference does not.
    tolerance = 2.0**-8 if rounds(ops.isa, w13.dtype) else 2e-6
    seen = as_seen(ops.isa, x, w13)
    close(whole, REF.moe_experts(seen, ids, weights, w13, w2), tolerance)
    for t in range(9):
        one = CpuOps(1, isa=ops.isa).moe_experts(
            x[t : t + 1], ids[t : t + 1], weights[t : t + 1], w13, w2
        )
        assert torch.equal(one[0], whole[t])


# ---- sampling ----------------------------------------------------------------------------------


def drawn(ops: CpuOps, logits: torch.Tensor, count: int, **how: float) -> torch.Tensor:
    rows = [RowSampling(seed=5, position=i, **how) for i in range(count)]
    return torch.tensor(ops.sample(logits.expand(count, -1).contiguous(), rows).ids)


def exact(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    p = (logits.double() / temperature).softmax(-1)
    p[p < min_p * p.max()] = 0
    order = p.argsort(descending=True, stable=True)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.8, 0.0),
        (1.5, 5, 1.0, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.2, 20, 0.7, 0.02),
    ],
)
def test_sampling_follows_the_exact_distribution(
    ops: CpuOps, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits, count = noise(37, seed=3) * 2, 20_000
    p = exact(logits, temperature, top_k, top_p, min_p)
    ids = drawn(ops, logits, count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seen = torch.bincount(ids, minlength=37).double()
    assert (seen[p == 0] == 0).all()
    expected = p * count
    chi2 = ((seen - expected) ** 2 / expected.clamp(min=1e-12))[p > 0].sum().item()
    freedom = int((p > 0).sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_greedy_seeds_and_logprobs(ops: CpuOps) -> None:
    logits = noise(3, 1000, seed=7)
    logits[0, [4, 900]] = 9.0
    rows = [RowSampling(1, 0, temperature=0.0, top_logprobs=3) for _ in range(3)]
    got, want = ops.sample(logits, rows), REF.sample(logits, rows)
    assert got.ids[0] == 4, "a tie goes to the lowest id"
    assert got.ids == want.ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
    assert [[i for i, _ in row] for row in got.top[1:]] == [[i for i, _ in r] for r in want.top[1:]]
    for mine, truth in zip(got.top, want.top, strict=True):
        assert [v for _, v in mine] == pytest.approx([v for _, v in truth], abs=1e-5)
    one = ops.sample(logits[1:2], [RowSampling(11, 3)]).ids
    again = ops.sample(logits, [RowSampling(9, 9), RowSampling(11, 3), RowSampling(1, 1)]).ids
    assert one[0] == again[1], "a draw depends on seed and position alone"


def test_penalties_bias_and_bans(ops: CpuOps) -> None:
    logits = noise(1, 50, seed=8)
    prompt = torch.tensor([1, 2, 2], dtype=torch.int32)
    output = torch.tensor([2, 3, 3, 3], dtype=torch.int32)
    want = logits[0].clone()
    want[7] += 1.5
    for token in (1, 2, 3):
        want[token] = want[token] / 1.3 if want[token] > 0 else want[token] * 1.3
    want[2] -= 0.4 + 0.2
    want[3] -= 0.4 + 3 * 0.2
    want[int(logits.argmax())] = -torch.inf
    row = {
        "repetition": 1.3, "presence": 0.4, "frequency": 0.2, "prompt": prompt, "output": output,
        "bias_ids": torch.tensor([7], dtype=torch.int32), "bias": torch.tensor([1.5]),
        "banned": torch.tensor([int(logits.argmax())], dtype=torch.int32),
    }  # fmt: skip
    assert ops.sample(logits, [RowSampling(1, 0, temperature=0.0, **row)]).ids == [
        int(want.argmax())
    ]
    count = 4000
    rows = [RowSampling(3, i, temperature=1.0, **row) for i in range(count)]
    ids = torch.tensor(ops.sample(logits.expand(count, -1).contiguous(), rows).ids)
    share = torch.bincount(ids, minlength=50).double() / count
    assert (share - want.double().softmax(-1)).abs().max() < 0.03


def test_a_poisoned_row_is_told_and_its_neighbours_are_not_touched(ops: CpuOps) -> None:
    logits = noise(3, 100)
    logits[0, 3] = torch.nan
    logits[2, 99] = torch.inf
    rows = [RowSampling(1, 0, temperature=0.0)] * 3
    assert ops.sample(logits, rows).ids == [-1, int(logits[1].argmax()), -1]
