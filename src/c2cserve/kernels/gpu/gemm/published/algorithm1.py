"""sym, asym and hybrid: Algorithm 1 of C2CServe and its two ends, to be compared with.

`hybrid` computes a share alpha of O's columns output-stationary (`sym`) and the others
weight-stationary (`asym`), in one launch of one kernel.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from c2cserve.core.tensors import HalfDtype
from c2cserve.kernels.gpu.aot.variants import DTYPES, Variant
from c2cserve.kernels.gpu.gemm.choice.cost import KernelModel, Question, Speeds, cublas_s, tiled_s
from c2cserve.kernels.gpu.gemm.dataflow import (
    Dataflow,
    Launch,
    Reference,
    covers,
    fitting,
    streams,
    tiles_of,
)
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, Traffic, ceil_div, sym_columns

ALPHAS = (0.25, 0.5, 0.75)
_SYM_EFFICIENCY, _ASYM_EFFICIENCY = 0.85, 0.40
"""Shares of cuBLAS's rate. asym: 4.39 ms where cuBLAS takes 1.71 (H200)."""

_VARIANTS = [
    Variant("hybrid", dtype, bx, kp=kp, partial_bytes=partial)
    for dtype in DTYPES
    for bx, kp in ((64, 256), (128, 256), (256, 256), (128, 512))
    for partial in (4, 2)
]
_BUILT = tiles_of(_VARIANTS)
SERVED: tuple[Variant, ...] = tuple(
    one for one in _VARIANTS if one.partial_bytes == 4 and one.kp == 256
)
"""The kernels of `served_tiles`."""


def _least(q: Question) -> list[Tiles]:
    return covers(fitting(_BUILT[q.dtype], q.sms), q.m) if streams(q) else []


def served_tiles(dtype: HalfDtype, rows: int, alpha: float) -> Tiles:
    """Return the tiles that `hybrid_linear.HybridLinear` launches for so many rows of X.

    Tall ones read W least often, and none is taller than it has to be (figure 8 of the paper).
    """
    return replace(covers(list(_BUILT[dtype]), rows)[0], alpha=alpha)


def _sym_candidates(q: Question) -> Iterator[Tiles]:
    for tiles in _least(q)[:1]:
        yield replace(tiles, alpha=1.0)


def _asym_candidates(q: Question) -> Iterator[Tiles]:
    for tiles in _least(q):
        yield replace(tiles, alpha=0.0)


def _hybrid_candidates(q: Question) -> Iterator[Tiles]:
    for tiles in _least(q)[:1]:
        for alpha in ALPHAS:
            yield replace(tiles, alpha=alpha)


def _sym_traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    """Output-stationary without multicast: W crosses the link once for every bx rows of X."""
    link_bytes = ceil_div(m, tiles.bx) * n * k * item_bytes
    return Traffic(link_bytes, ceil_div(n, BW) * m * k * item_bytes, m * n * item_bytes)


def _asym_traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    """Weight-stationary: sums are cleared, then read and written by each k panel's reduction."""
    x_reads = ceil_div(n, BW) * m * k * item_bytes
    sums = m * n * tiles.partial_bytes
    reduced = ceil_div(k, tiles.kp) * sums
    cast = Traffic(0, sums, m * n * item_bytes) if tiles.partial_bytes == 4 else Traffic()
    return Traffic(n * k * item_bytes, x_reads + reduced, sums + reduced) + cast


def _hybrid_traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    n_sym = sym_columns(n, tiles.alpha)
    sym = _sym_traffic(m, n_sym, k, item_bytes, tiles)
    return sym + _asym_traffic(m, n - n_sym, k, item_bytes, tiles)


def _sym_ctas(q: Question, tiles: Tiles) -> int:
    return ceil_div(q.n, BW) * ceil_div(q.rows, tiles.bx)


def _sym_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    return tiled_s(speeds, q, tiles.bx, 1, _sym_ctas(q, tiles)) / _SYM_EFFICIENCY


def _asym_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    return cublas_s(speeds, q) / _ASYM_EFFICIENCY


def _hybrid_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    share = tiles.alpha / _SYM_EFFICIENCY + (1 - tiles.alpha) / _ASYM_EFFICIENCY
    return cublas_s(speeds, q) * share


@cache
def _launcher() -> Launch:
    from c2cserve.kernels.gpu.gemm.launchers.hybrid import hybrid

    return hybrid


def _sym_reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import sym

    return sym


def _asym_reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import asym

    return asym


def _hybrid_reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import hybrid

    return hybrid


SYM = Dataflow(
    tile_fields=("bx",),
    candidates=_sym_candidates,
    traffic=_sym_traffic,
    model=KernelModel(_sym_traffic, 8e-6, _sym_s, readers=_sym_ctas),
    launcher=_launcher,
    reference=_sym_reference,
    published=True,
)
ASYM = Dataflow(
    tile_fields=("bx", "kp", "partial_bytes"),
    candidates=_asym_candidates,
    traffic=_asym_traffic,
    model=KernelModel(_asym_traffic, 15e-6, _asym_s),
    launcher=_launcher,
    reference=_asym_reference,
    published=True,
)
HYBRID = Dataflow(
    tile_fields=("bx", "kp", "partial_bytes", "alpha"),
    candidates=_hybrid_candidates,
    traffic=_hybrid_traffic,
    model=KernelModel(_hybrid_traffic, 15e-6, _hybrid_s),
    launcher=_launcher,
    reference=_hybrid_reference,
    variants=tuple(_VARIANTS),
    published=True,
)
