"""direct: W from its home straight into the multiply, once for each cluster's rows of X."""

from functools import cache

from c2cserve.kernels.gpu.aot.variants import (
    BX_ALONE,
    BX_SHARED,
    BX_SPLIT,
    CLUSTERS,
    DTYPES,
    Variant,
)
from c2cserve.kernels.gpu.gemm.choice.cost import (
    KernelModel,
    Question,
    Speeds,
    clustered_ctas,
    tiled_s,
)
from c2cserve.kernels.gpu.gemm.dataflow import (
    Dataflow,
    Launch,
    Reference,
    covers,
    fitting,
    one_matrix_by_tma,
    streams,
    tiles_of,
)
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, Traffic, ceil_div

_EFFICIENCY = 0.93
"""Share of cuBLAS's rate, where nothing else binds."""

_ALONE = [Variant("direct", dtype, bx) for dtype in DTYPES for bx in BX_ALONE]
_SHARED = [
    Variant("direct", dtype, bx, cluster)
    for dtype in DTYPES
    for cluster in CLUSTERS
    for bx in BX_SHARED
]
_GATED = [Variant("direct", dtype, bx, gated=True) for dtype in DTYPES for bx in BX_SPLIT]
_BUILT = tiles_of([*_ALONE, *_SHARED])


def _candidates(q: Question) -> list[Tiles]:
    """Those that cover the rows. By map: alone, in whole boxes, also out of HBM."""
    if q.by_map and one_matrix_by_tma(q):
        return covers([one for one in fitting(_BUILT[q.dtype], q.sms) if one.cluster == 1], q.m)
    return covers(fitting(_BUILT[q.dtype], q.sms), q.m) if streams(q) else []


def direct_traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    """Count W once for each cluster x bx rows of X, and X once for each tile of W."""
    w, m_blocks = n * k * item_bytes, ceil_div(m, tiles.block_rows)
    return Traffic(m_blocks * w, ceil_div(n, BW) * m * k * item_bytes, m * n * item_bytes)


def _compute_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    ctas = clustered_ctas(q, tiles)
    return tiled_s(speeds, q, tiles.bx, tiles.cluster, ctas) / _EFFICIENCY


@cache
def _launcher() -> Launch:
    from c2cserve.kernels.gpu.gemm.launchers.direct import direct

    return direct


def _reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import direct

    return direct


DIRECT = Dataflow(
    tile_fields=("bx", "cluster"),
    candidates=_candidates,
    traffic=direct_traffic,
    model=KernelModel(direct_traffic, 8e-6, _compute_s, readers=clustered_ctas),
    launcher=_launcher,
    reference=_reference,
    variants=(*_ALONE, *_SHARED, *_GATED),
    serving=(*(one for one in _ALONE if one.bx in BX_SPLIT), *_GATED),
)
