"""split: few rows of X and few tiles of W, so the CTAs of a cluster share a tile's K."""

from dataclasses import replace
from functools import cache

from c2cserve.kernels.gpu.aot.variants import BX_SPLIT, CLUSTERS_SPLIT, DTYPES, Variant
from c2cserve.kernels.gpu.gemm.choice.cost import KernelModel, Question, Speeds, tiled_s
from c2cserve.kernels.gpu.gemm.dataflow import (
    Dataflow,
    Launch,
    Reference,
    fitting,
    one_matrix_by_tma,
    streams,
    tiles_of,
)
from c2cserve.kernels.gpu.gemm.traffic import BK, BW, Tiles, Traffic, ceil_div

SPLIT_M_MAX = 64
"""Beyond, a cluster has more use for its CTAs along M than along K."""
_EFFICIENCY = 0.93
"""Share of cuBLAS's rate, where nothing else binds."""

_PLAIN = [
    Variant("split", dtype, bx, cluster)
    for dtype in DTYPES
    for cluster in CLUSTERS_SPLIT
    for bx in BX_SPLIT
]
_GATED = [replace(variant, gated=True) for variant in _PLAIN]
_BUILT = tiles_of(_PLAIN)


def _candidates(q: Question) -> list[Tiles]:
    """Return the narrowest tiles that hold all rows, shared by as many CTAs as have a k step.

    There are none where W has a tile for every SM: clusters along K would read no faster.
    """
    if not (streams(q) or (q.by_map and one_matrix_by_tma(q))):
        return []
    if q.m > SPLIT_M_MAX or ceil_div(q.n, BW) >= q.sms:
        return []
    tiles = fitting(_BUILT[q.dtype], q.sms)
    found = [one for one in tiles if one.bx >= q.m and one.cluster * BK <= q.k]
    narrowest = min((one.bx for one in found), default=0)
    return [one for one in found if one.bx == narrowest]


def _traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    w, m_blocks = n * k * item_bytes, ceil_div(m, tiles.bx)
    return Traffic(m_blocks * w, ceil_div(n, BW) * m * k * item_bytes, m * n * item_bytes)


def _ctas(q: Question, tiles: Tiles) -> int:
    return ceil_div(q.n, BW) * ceil_div(q.rows, tiles.bx) * tiles.cluster


def _compute_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    ctas = _ctas(q, tiles)
    return tiled_s(speeds, q, tiles.bx, tiles.cluster, ctas, shared_k=True) / _EFFICIENCY


@cache
def _launcher() -> Launch:
    from c2cserve.kernels.gpu.gemm.launchers.direct import split

    return split


def _reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import split

    return split


SPLIT = Dataflow(
    tile_fields=("bx", "cluster"),
    candidates=_candidates,
    traffic=_traffic,
    model=KernelModel(_traffic, 9e-6, _compute_s, readers=_ctas),
    launcher=_launcher,
    reference=_reference,
    variants=(*_PLAIN, *_GATED),
    serving=(*_PLAIN, *_GATED),
)
