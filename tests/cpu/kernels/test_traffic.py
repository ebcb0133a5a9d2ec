"""Closed-form traffic: the paper's figure, what each dataflow saves, and how W is cut."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName, traffic
from c2cserve.kernels.gpu.gemm.traffic import Tiles, panels, sym_columns


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *[("bx", bad) for bad in (0, 12, 264)],
        *[("cluster", bad) for bad in (0, 5, 16)],
        *[("kp", bad) for bad in (0, 96)],
        *[("panel_rows", bad) for bad in (0, 100)],
        *[("panel_growth", 0), ("slots", 0), ("alpha", 1.01), ("alpha", -0.1)],
    ],
)
def test_tiles_that_no_kernel_has_are_refused(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Tiles(**{field: bad})


def test_the_papers_figure_4b() -> None:
    """M=10240, N=16384, K=4096: sym moves 5.37 GB over the link, asym 0.13 (C2CServe, fig. 4b)."""
    shape = (10240, 16384, 4096, 2)
    w_bytes = 16384 * 4096 * 2
    sym = traffic("sym", *shape, Tiles(bx=256))
    assert sym.link_bytes == 40 * w_bytes
    assert round(sym.link_bytes / 1e9, 2) == 5.37
    wide = traffic("asym", *shape, Tiles(bx=256))
    narrow = traffic("asym", *shape, Tiles(bx=256, partial_bytes=2))
    assert wide.link_bytes == narrow.link_bytes == w_bytes
    assert round(wide.link_bytes / 1e9, 3) == 0.134
    assert wide.hbm_write_bytes > narrow.hbm_write_bytes > 10 * sym.hbm_write_bytes


def test_what_multicast_tee_and_ring_save_on_the_papers_shape() -> None:
    shape = (10240, 16384, 4096, 2)
    w_bytes = 16384 * 4096 * 2
    tiles = Tiles(bx=256, cluster=8)
    assert traffic("direct", *shape, tiles).link_bytes == 5 * w_bytes
    assert traffic("direct", 2048, *shape[1:], tiles).link_bytes == w_bytes
    once: tuple[DataflowName, ...] = ("tee", "ring", "prefetch")
    assert all(traffic(name, *shape, tiles).link_bytes == w_bytes for name in once)
    assert traffic("resident", *shape, tiles).link_bytes == 0


@given(m=st.integers(1, 20000), n=st.integers(1, 40000), alphas=st.tuples(*2 * [st.floats(0, 1)]))
def test_alpha_trades_link_bytes_for_reductions(
    m: int, n: int, alphas: tuple[float, float]
) -> None:
    less, more = (
        traffic("hybrid", m, n, 4096, 2, Tiles(bx=128, alpha=alpha)) for alpha in sorted(alphas)
    )
    assert less.link_bytes <= more.link_bytes
    assert less.hbm_write_bytes >= more.hbm_write_bytes


@given(n=st.integers(1, 40000), alpha=st.floats(0, 1))
def test_alpha_cuts_between_whole_tiles(n: int, alpha: float) -> None:
    columns = sym_columns(n, alpha)
    assert columns == n or columns % 128 == 0
    assert abs(columns - alpha * n) <= 64 + 1e-6
    assert (sym_columns(n, 0.0), sym_columns(n, 1.0)) == (0, n)


@given(n=st.integers(1, 40000), first=st.sampled_from([128, 512]), growth=st.integers(1, 4))
def test_panels_cover_w_once(n: int, first: int, growth: int) -> None:
    bounds = panels(n, first, growth)
    assert (bounds[0][0], bounds[-1][1]) == (0, n)
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    lengths = [stop - start for start, stop in bounds]
    assert lengths[:-1] == [first * growth**i for i in range(len(bounds) - 1)]
    assert 0 < lengths[-1] <= first * growth ** (len(bounds) - 1)


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_traffic_of_nothing_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        traffic("direct", *shape, 2, Tiles())
