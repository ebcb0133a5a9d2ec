"""The kernels for AMX, on a model of its instructions: the same source runs on any CPU."""

import fcntl
import os

import pytest
import small_layers
import torch
from example_counts import few
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import RUNNABLE, TILE_MODEL, as_seen
from small_layers import KINDS, WANTED, WHOLE, Model, OneByOne, check_wanted

from c2cserve.kernels import build, native
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import KvLayout
from c2cserve.kernels.ref import RefOps, write_token

REF = RefOps()


@pytest.fixture(autouse=True, scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once for all test processes: the compiler takes longer than all of these tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    name = build.library_name(TILE_MODEL)
    with (folder / "tile-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            build.build(folder, libraries={name: (build.SOURCES, build.tile_model_flags())})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY_FOLDER", folder)
        native.load_library(TILE_MODEL)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


@settings(max_examples=few(40, 10), deadline=None)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 100),
    k=st.sampled_from([1, 31, 32, 64, 130, 544, 1088]),
    biased=st.booleans(),
    data=st.data(),
)
def test_linear(m: int, n: int, k: int, data: st.DataObject, *, biased: bool) -> None:
    begin = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(begin + 1, min(m, begin + 40)))
    check_linear(m, n, k, begin, end, data.draw(st.integers(0, n - 1)), biased=biased)


@pytest.mark.parametrize("k", [130, pytest.param(1088, marks=pytest.mark.slow)])
def test_linear_of_more_rows_than_a_block_of_them(k: int) -> None:
    check_linear(540, 70, k, 505, 520, 33, biased=True)
    check_linear(540, 70, k, 530, 540, 69, biased=False)


def check_linear(
    m: int, n: int, k: int, begin: int, end: int, column: int, *, biased: bool
) -> None:
    """Near float64, nothing written beside the output, and a row's bits are its own."""
    x, w = noise(m, k, seed=m), noise(n, k + 3, seed=n).bfloat16()[:, :k]
    bias = noise(n, seed=k) if biased else None
    one, three = CpuOps(1, isa=TILE_MODEL), CpuOps(3, isa=TILE_MODEL)
    wide = torch.full((m, n + 3), torch.nan)
    whole = three.linear(x, w, bias, wide[:, :n])
    assert off(whole, REF.linear(as_seen(TILE_MODEL, x, w), w, bias)) < 4e-6
    assert wide[:, n:].isnan().all()
    assert torch.equal(one.linear(x[begin:end], w, bias), whole[begin:end])
    alone = one.linear(x[begin : begin + 1], w[column : column + 1])
    assert bias is not None or torch.equal(alone[0, 0], whole[begin, column])


def test_panels_of_many_strips() -> None:
    x, w = noise(70, 1100), noise(600, 1100, seed=1).bfloat16()
    whole = CpuOps(3, isa=TILE_MODEL).linear(x, w)
    assert off(whole, REF.linear(as_seen(TILE_MODEL, x, w), w)) < 4e-6
    assert torch.equal(CpuOps(1, isa=TILE_MODEL).linear(x[9:10], w)[0], whole[9])


TILED = [
    TILE_MODEL,
    pytest.param("amx", marks=pytest.mark.skipif("amx" not in RUNNABLE, reason="no AMX here")),
]


COPIES = (False, True)  # of strips of w: where tiles need them, or always


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize("m", [1, 9, 20])
@pytest.mark.parametrize("n", [56, 72, 100, 12])
def test_halves_of_tiles_have_the_bits_of_whole_ones(n: int, m: int, isa: str) -> None:
    x, w = noise(m, 2208), noise(n, 2208, seed=1).bfloat16()
    whole = CpuOps(1, isa=isa).linear(x, torch.cat([w, w]))[:, :n]
    for threads in (2, 3, 5):
        assert torch.equal(CpuOps(threads, isa=isa).linear(x, w), whole)


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize("m", [1, 17])
@pytest.mark.parametrize(
    ("n", "k"),
    # Rows that would share lines of a cache; several ranges for a thread, of tiles and of halves.
    [(280, 64), (528, 32), (1040, 544), (1016, 544)],
)
def test_few_rows_have_the_same_bits_however_far_their_strips_rows_lie_apart(
    n: int, k: int, m: int, isa: str
) -> None:
    x, w = noise(m, k), noise(2 * n, k, seed=1).bfloat16()
    bias = noise(n, seed=2)
    alone = torch.cat(
        [CpuOps(1, isa=isa).linear(x, w[i : i + 8], bias[i : i + 8]) for i in range(0, n, 8)], 1
    )
    gated = torch.cat(
        [
            CpuOps(1, isa=isa).gated(x, torch.cat([w[i : i + 8], w[n + i : n + i + 8]]))
            for i in range(0, n, 8)
        ],
        1,
    )
    for threads in (1, 2, 3):
        ops = CpuOps(threads, isa=isa)
        assert torch.equal(ops.linear(x, w[:n], bias), alone)
        assert torch.equal(ops.gated(x, w), gated)


def spread(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, and weights of very different sizes."""
    sizes = noise(n, k, seed=m + 100).mul(2.0).exp()
    return noise(m, k, seed=m), (noise(n, k, seed=m + 50) * sizes).bfloat16()


def check_many_rows(isa: str, m: int, n: int, k: int) -> None:
    ops = CpuOps(2, isa=isa)
    x, w = spread(m, n, k)
    rows = [0, m // 2, m - 1]
    want = torch.cat([ops.linear(x[row : row + 1], w) for row in rows]).view(torch.int32)
    usual = ops.linear(x, w).view(torch.int32)
    assert torch.equal(usual[rows], want)
    ops.copy_strips(always=True)
    assert torch.equal(ops.linear(x, w).view(torch.int32), usual)


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize(
    "shape",
    # Strips and tiles of x that end before they are whole; columns that are copied; chunks.
    [(33, 7, 32), (48, 60, 1100), (70, 290, 352), (40, 64, 2048), (36, 20, 2112)]
    + [pytest.param(s, marks=pytest.mark.slow)
       for s in [(36, 20, 8300), (530, 40, 64), (40, 290, 2112), (520, 33, 2090)]],
)  # fmt: skip
def test_many_rows_have_the_bits_of_each_alone(shape: tuple[int, int, int], isa: str) -> None:
    """Whether w is copied or not."""
    check_many_rows(isa, *shape)


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize(
    "shape",
    # Little work; several parts for each thread, of a block of rows and of several; chunks.
    [(70, 290, 352), (70, 1000, 352), (260, 90, 1024), (70, 520, 2112)],
)
def test_parts_that_follow_each_other_on_a_thread_have_the_bits_of_one_part(
    shape: tuple[int, int, int], isa: str
) -> None:
    m, n, k = shape
    x, w, bias = *spread(m, n, k), noise(n, seed=3)
    for w_in in (w, w[:, 1:]):  # the latter has rows that no tile reads in place
        x_in = x[:, -w_in.shape[1] :]
        whole = CpuOps(1, isa=isa).linear(x_in, w_in, bias)
        for threads in (2, 3, 7):
            assert torch.equal(CpuOps(threads, isa=isa).linear(x_in, w_in, bias), whole)


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize(
    "shape",
    [(1, 40, 64), (5, 33, 128), (16, 7, 1100), (20, 50, 96), (17, 16, 31), (33, 7, 32)]
    + [(70, 150, 352), (1, 56, 1088), (20, 56, 1088)]  # threads share out halves of tiles
    + [pytest.param(s, marks=pytest.mark.slow)
       for s in [(32, 48, 1088), (40, 150, 2112), (520, 17, 2090)]],
)  # fmt: skip
def test_gated_products_have_the_bits_of_their_halves(
    shape: tuple[int, int, int], isa: str
) -> None:
    """As those of a product whose halves are combined later."""
    m, n, k = shape
    ops = CpuOps(2, isa=isa)
    x, w = noise(m, k, seed=m), (noise(2 * n, k, seed=m + 50) / 4).bfloat16()
    for copies in COPIES:
        ops.copy_strips(always=copies)
        for bias in (None, noise(2 * n, seed=k)):
            want = ops.silu_mul(ops.linear(x, w, bias)).view(torch.int32)
            assert torch.equal(ops.gated(x, w, bias).view(torch.int32), want)


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize("tokens", [5, 20, 75])
@pytest.mark.parametrize(
    "inner", [16, 27, 28, 48, 96, 264, pytest.param(2100, marks=pytest.mark.slow)]
)
def test_what_tiles_write_for_the_next_product_has_the_bits_of_rows(
    inner: int, tokens: int, isa: str
) -> None:
    """The one expert of a token is its gated product and the one after it."""
    ops, hidden = CpuOps(2, isa=isa), 64
    w13 = (noise(1, 2 * inner, hidden, seed=1) / 4).bfloat16()
    w2 = (noise(1, hidden, inner, seed=2) / 4).bfloat16()
    whole = (inner // 32 + 2) * 32
    wider = torch.ones(1, 2 * whole, hidden).bfloat16(), torch.ones(1, hidden, whole).bfloat16()
    x = noise(tokens, hidden)
    x[3, 5], x[4, 6] = torch.nan, torch.inf  # and those beside them are numbers
    x[tokens - 5, 7] = 1e30
    ids, weights = torch.zeros((tokens, 1), dtype=torch.int32), torch.ones((tokens, 1))
    want = 0.0 + ops.linear(ops.gated(x, w13[0]), w2[0])  # a token's sum begins with zero
    for copies in COPIES:
        ops.copy_strips(always=copies)
        ops.moe_experts(x * torch.nan, ids, weights, *wider)  # fills the memory between them
        got = ops.moe_experts(x, ids, weights, w13, w2)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spans",
    # 1, 3, 16, 20 rows, which are few, all 58, and whole tiles' rows of one sequence.
    [
        {1: (0, 1)},
        {0: (0, 2), 1: (0, 1)},
        {2: (0, 16)},
        {0: (0, 11), 2: (0, 9)},
        WHOLE,
        {0: (0, 48)},
        {1: (0, 1), 0: (0, 48)},
    ],
)
def test_layers_are_their_operators_one_by_one(
    spans: dict[int, tuple[int, int]], kind: str, isa: str
) -> None:
    whole, single = Model.of(CpuOps(3, isa=isa), kind), Model.of(OneByOne(1, isa=isa), kind)
    got, want = whole.run(spans), single.run(spans)
    assert spans is not WHOLE or sum(map(len, got.values())) > 32
    assert all(torch.equal(got[s].view(torch.int32), want[s].view(torch.int32)) for s in spans)
    assert torch.equal(whole.arena, single.arena)


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize("tokens", [3, 20])
def test_norms_of_wide_rows_are_shared_out(
    tokens: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows, and then by columns. Columns end within a step of tiles."""
    monkeypatch.setattr(small_layers, "HIDDEN", 5020)
    spans = {2: (0, tokens)}
    whole, single = Model.of(CpuOps(3, isa=isa), "dense"), Model.of(OneByOne(1, isa=isa), "dense")
    got, want = whole.run(spans)[2], single.run(spans)[2]
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", WANTED)
def test_rows_that_are_not_wanted_change_no_others(
    wanted: tuple[int, ...], kind: str, isa: str
) -> None:
    check_wanted(CpuOps(3, isa=isa), kind, wanted)


@pytest.mark.parametrize("isa", TILED)
def test_what_tiles_held_before_does_not_reach_other_rows(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention's rows are longer than those of norms here, and end within a step of tiles."""
    monkeypatch.setattr(small_layers, "HEADS", 10)
    ops = CpuOps(2, isa=isa)
    want = Model.of(ops, "dense").run(WHOLE)
    broken = Model.of(ops, "dense")
    for layer in broken.layers:
        layer.weights.input_norm.fill_(torch.nan)
        layer.weights.post_norm.fill_(torch.nan)
    broken.run(WHOLE)
    got = Model.of(ops, "dense").run(WHOLE)
    assert all(torch.equal(got[s], want[s]) for s in WHOLE)


def test_the_ceiling_of_tiles_counts_what_it_does() -> None:
    assert CpuOps(2, isa=TILE_MODEL).tile_steps(4096, 2048, 3) == 2 * 3 * 4 * 2 * 16 * 16 * 32
    with pytest.raises(ValueError, match="not whole steps"):
        CpuOps(1, isa=TILE_MODEL).tile_steps(4096, 1024, 1)


def step(
    kv: KvLayout, lengths: list[int], new: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of the last `new` tokens of each sequence, a cache whose unused slots hold NaN,
    its block table, and the lengths."""
    blocks = [-(-length // 16) for length in lengths]
    arena = torch.full((sum(blocks) * kv.block_bytes,), 0xFF, dtype=torch.uint8)
    order = (torch.randperm(sum(blocks)) * kv.block_bytes).split(blocks)
    table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int64)
    for s, (part, length) in enumerate(zip(order, lengths, strict=True)):
        table[s, : len(part)] = part
        for t in range(length):
            k, v = noise(2, kv.kv_heads, kv.head_dim, seed=97 * s + t)
            write_token(arena, kv, 0, int(table[s, t // 16]) * 16 + t % 16, k, v)
    width = (heads + 2 * kv.kv_heads) * kv.head_dim
    queries = noise(len(lengths) * new, width, seed=5).bfloat16().float()
    return queries, arena, table, torch.tensor(lengths, dtype=torch.int32)


def noise_arena(kv: KvLayout, blocks: int) -> torch.Tensor:
    values = noise(blocks * kv.block_bytes // 2, seed=7).bfloat16()
    return values.view(torch.uint8)


@pytest.mark.parametrize("window", [0, 45])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 64), (4, 2, 24), (20, 1, 80)])
def test_attention(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """Near float64, and a row's bits are its own, with any rows beside it."""
    kv, new = KvLayout(1, kv_heads, dim, "bfloat16"), 6
    queries, arena, table, lengths = step(kv, [6, 65, 130, 1100], new, heads)
    starts = torch.arange(0, 4 * new + 1, new, dtype=torch.int32)
    one, three = CpuOps(1, isa=TILE_MODEL), CpuOps(3, isa=TILE_MODEL)
    where = (arena, kv, 0, starts, lengths, table, dim**-0.5, window)
    whole = three.attention(queries, *where)
    assert off(whole, REF.attention(queries, *where)) < 2.0**-8
    for s in range(4):
        for i in (0, 3, new - 1):
            alone = one.attention(
                queries[s * new + i][None], arena, kv, 0, torch.tensor([0, 1], dtype=torch.int32),
                lengths[s : s + 1] - new + i + 1, table[s : s + 1], dim**-0.5, window,
            )  # fmt: skip
            assert torch.equal(alone[0], whole[s * new + i])


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 64), (4, 2, 24)])
def test_attention_of_a_prompt(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """Many rows go another way than few, in groups, and have the bits of each row alone."""
    kv, lengths, new = KvLayout(1, kv_heads, dim, "bfloat16"), [75, 1100], 75
    queries, arena, table, context = step(kv, lengths, new, heads)
    starts = torch.tensor([0, new, 2 * new], dtype=torch.int32)
    one, three = CpuOps(1, isa=TILE_MODEL), CpuOps(3, isa=TILE_MODEL)
    where = (arena, kv, 0, starts, context, table, dim**-0.5, window)
    whole = three.attention(queries, *where)
    assert off(whole, REF.attention(queries, *where)) < 2.0**-8
    assert torch.equal(one.attention(queries, *where), whole)
    for s in range(2):
        for i, rows in ((0, 1), (13, 1), (40, 20), (new - 1, 1), (new - 1, 9)):
            end = s * new + i + 1
            part = one.attention(
                queries[end - rows : end], arena, kv, 0,
                torch.tensor([0, rows], dtype=torch.int32), context[s : s + 1] - new + i + 1,
                table[s : s + 1], dim**-0.5, window,
            )  # fmt: skip
            assert torch.equal(part, whole[end - rows : end])


def test_more_keys_than_are_laid_out_at_once() -> None:
    """32 MiB of them: heads take turns. A sequence of one row has nothing to lay out."""
    heads, dim, context, new = 66, 64, 2000, 48
    kv = KvLayout(1, heads, dim, "bfloat16")
    assert heads * context * dim * 2 * 2 > 32 << 20
    arena = noise_arena(kv, -(-context // 16) + 1)
    blocks = torch.arange(-(-context // 16) + 1) * kv.block_bytes
    table = torch.stack([blocks[:-1], blocks[-1:].expand(len(blocks) - 1)])
    queries = noise(new + 1, 3 * heads * dim, seed=5).bfloat16().float()
    starts = torch.tensor([0, new, new + 1], dtype=torch.int32)
    lengths = torch.tensor([context, 3], dtype=torch.int32)
    one, three = CpuOps(1, isa=TILE_MODEL), CpuOps(3, isa=TILE_MODEL)
    whole = three.attention(queries, arena, kv, 0, starts, lengths, table, dim**-0.5, 0)
    for row, seq, length in ((0, 0, context - new + 1), (new - 1, 0, context), (new, 1, 3)):
        alone = one.attention(
            queries[row][None], arena, kv, 0, torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32), table[seq : seq + 1], dim**-0.5, 0,
        )  # fmt: skip
        assert torch.equal(alone[0], whole[row])


def test_experts() -> None:
    one, three = CpuOps(1, isa=TILE_MODEL), CpuOps(3, isa=TILE_MODEL)
    x, router = noise(60, 64), noise(60, 5, seed=1)
    w13, w2 = noise(5, 96, 64, seed=2).bfloat16(), noise(5, 64, 48, seed=3).bfloat16()
    ids, weights = three.moe_route(router, 2, True)
    whole = three.moe_experts(x, ids, weights, w13, w2)
    want = REF.moe_experts(as_seen(TILE_MODEL, x, w13), ids, weights, w13, w2)
    assert off(whole, want) < 2.0**-8
    for t in (0, 59):
        row = slice(t, t + 1)
        alone = one.moe_experts(x[row], ids[row], weights[row], w13, w2)
        assert torch.equal(alone[0], whole[t])


def test_what_is_not_a_number_stays_one() -> None:
    x = torch.ones(20, 64)
    x[3, 7] = torch.nan
    w = torch.ones(5, 64, dtype=torch.bfloat16)
    poisoned = CpuOps(1, isa=TILE_MODEL).linear(x, w).isnan().all(1)
    assert poisoned.nonzero().flatten().tolist() == [3]


@pytest.mark.skipif("amx" not in RUNNABLE, reason="this machine has no AMX")
@pytest.mark.parametrize("rows", [1, 20, 100])
def test_the_model_is_the_processor(rows: int) -> None:
    x, w = noise(rows, 1100), noise(130, 1100, seed=1).bfloat16()
    real, model = CpuOps(2, isa="amx"), CpuOps(2, isa=TILE_MODEL)
    assert torch.equal(real.linear(x, w), model.linear(x, w))
    kv = KvLayout(1, 2, 64, "bfloat16")
    queries, arena, table, lengths = step(kv, [rows + 50], rows, 14)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    where = (arena, kv, 0, starts, lengths, table, 0.125, 0)
    assert torch.equal(real.attention(queries, *where), model.attention(queries, *where))
