"""Reference dataflows against float64, and the bytes they count against the closed forms."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Literal

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2cserve.kernels.gpu.gemm.dataflow import Reference
from c2cserve.kernels.gpu.gemm.dataflows.table import DATAFLOWS, DataflowName, traffic
from c2cserve.kernels.gpu.gemm.ref import Memory, asym, direct, hybrid, split
from c2cserve.kernels.gpu.gemm.ref_grouped import grouped_direct
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic, grouped_traffic, sym_columns

NAMES: tuple[DataflowName, ...] = tuple(name for name, flow in DATAFLOWS.items() if flow.reference)
DTYPES = (torch.bfloat16, torch.float16)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff: the largest relative error of one rounding to nearest."""
FLOAT32_UNIT = 2.0**-24
SUBNORMAL = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
"""Half the smallest subnormal: the largest absolute error of a rounding near zero."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(dataflow: DataflowName) -> Reference:
    found = DATAFLOWS[dataflow].reference
    assert found is not None
    return found()


def noise(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(rows: int, columns: int, gap: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[rows, columns] with NaN in the `gap` elements between rows."""
    wide = torch.full((rows, columns + gap), torch.nan, dtype=dtype)
    wide[:, :columns] = noise(rows, columns, dtype=dtype, seed=seed)
    return wide[:, :columns]


def exact(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ w.double().T
    return out if bias is None else out + bias.double()


def float32_bound(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Largest error of K float32 additions in any order (products of 16-bit floats are exact):
    gamma_K = K u / (1 - K u) times the sum of magnitudes, one addition more for the bias."""
    magnitude = exact(x.abs(), w.abs(), None if bias is None else bias.abs())
    growth = (x.shape[1] + 1) * FLOAT32_UNIT
    return growth / (1 - growth) * magnitude


def rounded_once_bound(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Float32 accumulation, then one rounding of a value at most that far from the exact one."""
    error, unit = float32_bound(x, w, bias), UNIT[x.dtype]
    return error + unit * (exact(x, w, bias).abs() + error) + SUBNORMAL[x.dtype]


def partials_bound(x: Tensor, w: Tensor, bias: Tensor | None, kp: int) -> Tensor:
    """Sums kept in x's dtype u: O starts at the bias and takes P panels' partial sums p_i.

    Each p_i is rounded, then goes through at most P rounded additions, so O is the sum of
    p_i (1 + d_i) with |d_i| <= (1 + u)^(P + 1) - 1, and the float32 error of each p_i on top.
    """
    unit, starts = UNIT[x.dtype], range(0, x.shape[1], kp)
    growth = (1 + unit) ** (len(starts) + 1)
    error = float32_bound(x, w, bias)
    terms = sum(exact(x[:, s : s + kp], w[:, s : s + kp], None).abs() for s in starts)
    terms = terms if bias is None else terms + bias.double().abs()
    return growth * error + (growth - 1) * terms + 2 * len(starts) * growth * SUBNORMAL[x.dtype]


def assert_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    excess = (got.double() - want).abs() - bound
    assert bool((excess <= 0).all()), f"error exceeds its bound by {excess.max():.3g}"


TILES = st.builds(
    Tiles,
    bx=st.sampled_from([8, 16, 32, 64, 128, 192, 256]),
    cluster=st.sampled_from([1, 2, 4, 8]),
    kp=st.sampled_from([64, 128, 256, 512]),
    panel_rows=st.sampled_from([128, 256, 384]),
    panel_growth=st.integers(1, 3),
    slots=st.integers(1, 3),
    alpha=st.floats(0, 1),
)


@pytest.mark.parametrize("dataflow", NAMES)
@settings(max_examples=examples(80), deadline=None)
@given(
    m=st.integers(1, 700),
    n=st.integers(1, 600),
    k=st.integers(1, 80).map(lambda eighths: 8 * eighths),
    gap=st.integers(0, 3).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    tiles=TILES,
)
def test_every_dataflow_over_odd_shapes(
    dataflow: DataflowName,
    m: int,
    n: int,
    k: int,
    gap: int,
    dtype: torch.dtype,
    with_bias: bool,
    tiles: Tiles,
) -> None:
    x, w = strided(m, k, gap, dtype, seed=m), noise(n, k, dtype=dtype, seed=n)
    bias = noise(n, dtype=dtype, seed=k) if with_bias else None
    got = reference(dataflow)(x, w, bias, tiles)
    assert (got.out.shape, got.out.dtype) == ((m, n), dtype)
    assert_within(got.out, exact(x, w, bias), rounded_once_bound(x, w, bias))
    assert got.traffic == traffic(dataflow, m, n, k, 2, tiles)


@pytest.mark.parametrize("dataflow", ["asym", "hybrid"])
@settings(max_examples=examples(80), deadline=None)
@given(
    m=st.integers(1, 300),
    n=st.integers(1, 400),
    k=st.integers(1, 80).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    bx=st.sampled_from([32, 64, 256]),
    kp=st.sampled_from([64, 128, 256]),
    alpha=st.floats(0, 1),
    order=st.randoms(use_true_random=False),
)
def test_16_bit_partial_sums_stay_within_their_bound(
    dataflow: DataflowName,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    with_bias: bool,
    bx: int,
    kp: int,
    alpha: float,
    order: Random,
) -> None:
    tiles = Tiles(bx=bx, kp=kp, alpha=alpha, partial_bytes=2)
    x, w = noise(m, k, dtype=dtype, seed=m), noise(n, k, dtype=dtype, seed=n)
    bias = noise(n, dtype=dtype, seed=k) if with_bias else None
    k_order = list(range(-(-k // kp)))
    order.shuffle(k_order)
    got = (asym if dataflow == "asym" else hybrid)(x, w, bias, tiles, k_order)
    bound = partials_bound(x, w, bias, kp)
    if dataflow == "hybrid":
        n_sym = sym_columns(n, alpha)
        bound[:, :n_sym] = rounded_once_bound(x, w, bias)[:, :n_sym]
    assert_within(got.out, exact(x, w, bias), bound)
    assert got.traffic == traffic(dataflow, m, n, k, 2, tiles)


def test_16_bit_partial_sums_cost_accuracy_and_save_bytes() -> None:
    x, w = (noise(128, 4096, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    wide, narrow = (asym(x, w, None, Tiles(kp=128, partial_bytes=b)) for b in (4, 2))
    want = exact(x, w, None)
    rms = [float((run.out.double() - want).square().mean().sqrt()) for run in (wide, narrow)]
    assert 2 * rms[0] < rms[1], "32 panels are 63 roundings where float32 partials have one"
    assert narrow.traffic.hbm_read_bytes < wide.traffic.hbm_read_bytes
    assert narrow.traffic.hbm_write_bytes < wide.traffic.hbm_write_bytes


@pytest.mark.parametrize("dataflow", ["resident", "prefetch"])
@pytest.mark.parametrize("k", [1, 7, 65, 131])
def test_library_dataflows_take_any_k_and_any_row_stride(dataflow: DataflowName, k: int) -> None:
    x, w = strided(33, k, 3, torch.bfloat16, seed=k), noise(300, k, dtype=torch.bfloat16, seed=2)
    got = reference(dataflow)(x, w, None, Tiles(panel_rows=128))
    assert_within(got.out, exact(x, w, None), rounded_once_bound(x, w, None))
    assert got.traffic == traffic(dataflow, 33, 300, k, 2, Tiles(panel_rows=128))


def cancelling(columns: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """x [1, k] and w [1, k] whose product is 2^26 at columns[0], 1 at [1], -2^26 at [2].

    In float32 the 1 survives only when it is added after the other two have met.
    """
    x, w = torch.zeros(2, 1, k, dtype=torch.bfloat16).unbind()
    x[0, list(columns)] = torch.tensor([8192.0, 1.0, -8192.0], dtype=torch.bfloat16)
    w[0, list(columns)] = torch.tensor([8192.0, 1.0, 8192.0], dtype=torch.bfloat16)
    return x, w


@pytest.mark.parametrize(
    ("columns", "total"),
    [((0, 64, 128), 0), ((0, 128, 64), 1), ((64, 128, 0), 1), ((128, 0, 64), 0)],
)
def test_split_sums_ranks_in_order(columns: tuple[int, int, int], total: int) -> None:
    x, w = cancelling(columns, 256)
    outs = [split(x, w, None, Tiles(cluster=4)).out.item() for _ in range(3)]
    assert outs == [total] * 3


def test_split_gives_each_rank_its_share_of_the_k_steps() -> None:
    """Seven steps over two ranks: 0 to 2 and 3 to 6; each product shows one side of the border."""
    x, w = cancelling((0, 192, 128), 448)  # rank 0: 2^26 - 2^26; rank 1: 1
    assert split(x, w, None, Tiles(cluster=2)).out.item() == 1
    x, w = cancelling((0, 256, 192), 448)  # rank 0: 2^26; rank 1: -2^26 + 1, which loses the 1
    assert split(x, w, None, Tiles(cluster=2)).out.item() == 0


def test_split_over_one_rank_is_direct_bit_for_bit() -> None:
    x, w = (noise(rows, 328, dtype=torch.float16, seed=rows) for rows in (70, 300))
    assert torch.equal(split(x, w, None, Tiles(bx=64)).out, direct(x, w, None, Tiles(bx=64)).out)


@pytest.mark.parametrize(("order", "total"), [((0, 1, 2), 0), ((0, 2, 1), 1), ((2, 0, 1), 1)])
@pytest.mark.parametrize("partial_bytes", [2, 4])
def test_asym_reduces_k_panels_in_the_order_given(
    order: tuple[int, ...], total: int, partial_bytes: Literal[2, 4]
) -> None:
    x, w = cancelling((0, 64, 128), 192)
    tiles = Tiles(kp=64, partial_bytes=partial_bytes)
    assert asym(x, w, None, tiles, order).out.item() == total


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 2, 2), (0, 1, 3)])
def test_asym_refuses_an_order_that_is_no_permutation(order: tuple[int, ...]) -> None:
    x, w = (noise(rows, 192, dtype=torch.bfloat16, seed=rows) for rows in (9, 130))
    with pytest.raises(ValueError, match="k_order"):
        asym(x, w, None, Tiles(kp=64), order)


@pytest.mark.parametrize("partial_bytes", [2, 4])
def test_hybrid_joins_sym_and_asym(partial_bytes: Literal[2, 4]) -> None:
    x, w = (noise(rows, 264, dtype=torch.bfloat16, seed=rows) for rows in (100, 500))
    bias = noise(500, dtype=torch.bfloat16, seed=3)

    def run(dataflow: DataflowName, alpha: float) -> Tensor:
        tiles = Tiles(bx=64, kp=64, alpha=alpha, partial_bytes=partial_bytes)
        return reference(dataflow)(x, w, bias, tiles).out

    asym_out, sym_out = run("asym", 0.3), run("sym", 0.3)
    assert torch.equal(run("hybrid", 0.0), asym_out)
    assert torch.equal(run("hybrid", 1.0), sym_out)
    assert torch.equal(run("hybrid", 0.5), torch.cat((sym_out[:, :256], asym_out[:, 256:]), 1))


def assert_grouped(counts: Sequence[int], n: int, k: int, dtype: torch.dtype, t: Tiles) -> Traffic:
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    borders = offsets.tolist()
    x = strided(borders[-1], k, 8, dtype, seed=k)
    w = noise(len(counts), n, k, dtype=dtype, seed=n)
    got = grouped_direct(x, w, offsets, t)
    for expert, (start, stop) in zip(w, pairwise(borders), strict=True):
        rows = x[start:stop]
        bound = rounded_once_bound(rows, expert, None)
        assert_within(got.out[start:stop], exact(rows, expert, None), bound)
    assert got.traffic == grouped_traffic(borders, n, k, 2, t)
    return got.traffic


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), bx=st.sampled_from([8, 16, 64]), cluster=st.sampled_from([1, 2, 4]))
def test_grouped_around_tile_borders(data: st.DataObject, bx: int, cluster: int) -> None:
    near = {0, 1, bx - 1, bx, bx + 1, bx * cluster - 1, bx * cluster, bx * cluster + 1}
    counts = data.draw(st.lists(st.sampled_from(sorted(near)), min_size=1, max_size=7))
    n, k = data.draw(st.integers(1, 300)), 8 * data.draw(st.integers(1, 20))
    dtype = data.draw(st.sampled_from(DTYPES))
    assert_grouped(counts, n, k, dtype, Tiles(bx=bx, cluster=cluster))


def test_grouped_fetches_only_chosen_experts() -> None:
    n, k, tiles = 200, 72, Tiles(bx=16, cluster=2)
    expert_bytes = 2 * n * k
    spread = assert_grouped([3, 0, 0, 5, 0], n, k, torch.bfloat16, tiles)
    assert spread.link_bytes == 2 * expert_bytes
    one = assert_grouped([0, 0, 97, 0], n, k, torch.bfloat16, tiles)
    assert one.link_bytes == 4 * expert_bytes, "97 rows are four blocks of 32"
    assert assert_grouped([0, 0], n, k, torch.bfloat16, tiles) == Traffic()


def test_grouped_with_one_expert_is_direct() -> None:
    x, w = (noise(rows, 136, dtype=torch.bfloat16, seed=rows) for rows in (77, 300))
    tiles = Tiles(bx=32, cluster=2)
    grouped = grouped_direct(x, w[None], torch.tensor([0, 77], dtype=torch.int32), tiles)
    plain = direct(x, w, None, tiles)
    assert torch.equal(grouped.out, plain.out)
    assert grouped.traffic == plain.traffic


@pytest.mark.parametrize("offsets", [[0, 5, 4, 9], [1, 2, 3, 9], [0, 3, 9], [0, 3, 5, 8], []])
def test_grouped_refuses_offsets_that_do_not_partition_x(offsets: list[int]) -> None:
    x, w = torch.zeros(9, 8).bfloat16(), torch.zeros(3, 4, 8).bfloat16()
    with pytest.raises(ValueError, match="offsets"):
        grouped_direct(x, w, torch.tensor(offsets, dtype=torch.int32), Tiles())


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w = torch.zeros(3, 16).bfloat16(), torch.zeros(4, 16).bfloat16()
    for bad_x, bad_w, bias, message in (
        (x.float(), w.float(), None, "bfloat16"),
        (x, w.half(), None, "bfloat16"),
        (x[:, :8], w, None, "do not fit"),
        (x.T.contiguous().T, w, None, "next to each other"),
        (x, torch.zeros(4, 24).bfloat16()[:, :16], None, "next to each other"),
        (x, w, torch.zeros(3).bfloat16(), "bias"),
        (x, w, torch.zeros(4), "bias"),
        (x[:, :12], w[:, :12].contiguous(), None, "multiples of 8"),
        (torch.zeros(3, 20).bfloat16()[:, :16], w, None, "multiples of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            direct(bad_x, bad_w, bias, Tiles())


def test_storing_an_element_never_or_twice_is_caught() -> None:
    memory = Memory(torch.zeros(10, 8).bfloat16(), 6, None)
    memory.store(0, 0, torch.ones(10, 5))
    with pytest.raises(AssertionError, match="exactly once"):
        memory.result()
    memory.store(0, 5, torch.ones(10, 1))
    assert memory.result().out.eq(1).all()
    memory.store(9, 5, torch.ones(1, 1))
    with pytest.raises(AssertionError, match="exactly once"):
        memory.result()
