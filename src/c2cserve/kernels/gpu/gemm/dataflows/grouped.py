"""grouped: `direct` for a mixture of experts; rows of X are sorted by expert, each with its W."""

from c2cserve.kernels.gpu.aot.variants import BX_ALONE, CLUSTERS, DTYPES, Variant
from c2cserve.kernels.gpu.gemm.choice.cost import (
    KernelModel,
    Question,
    Speeds,
    clustered_ctas,
    tiled_s,
)
from c2cserve.kernels.gpu.gemm.dataflow import Dataflow, by_tma, covers, fitting, tiles_of
from c2cserve.kernels.gpu.gemm.dataflows.direct import direct_traffic
from c2cserve.kernels.gpu.gemm.traffic import Tiles

_EFFICIENCY = 0.90
"""Share of cuBLAS's rate, where nothing else binds."""

_ALONE = [Variant("grouped", dtype, bx) for dtype in DTYPES for bx in BX_ALONE]
_SHARED = [Variant("grouped", dtype, 256, cluster) for dtype in DTYPES for cluster in CLUSTERS]
_BUILT = tiles_of([*_ALONE, *_SHARED])


def _candidates(q: Question) -> list[Tiles]:
    """Cover the rows an active expert is expected to have, and twice as many.

    A second block costs the expert's weights once more.
    """
    if not (q.experts and by_tma(q)):
        return []
    fit = fitting(_BUILT[q.dtype], q.sms)
    tiles = [one for one in fit if one.cluster == 1 or not q.by_map]
    exact = covers(tiles, q.rows)
    return exact + [one for one in covers(tiles, 2 * q.rows) if one not in exact]


def _link_bytes(q: Question, tiles: Tiles) -> float:
    return q.blocks(tiles.block_rows) / q.active_experts * q.n * q.k * q.item_bytes


def _compute_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    ctas = clustered_ctas(q, tiles)
    return tiled_s(speeds, q, tiles.bx, tiles.cluster, ctas) / _EFFICIENCY


GROUPED = Dataflow(
    tile_fields=("bx", "cluster"),
    candidates=_candidates,
    traffic=direct_traffic,
    model=KernelModel(
        direct_traffic, 10e-6, _compute_s, readers=clustered_ctas, link_bytes=_link_bytes
    ),
    launcher=None,
    reference=None,
    variants=(*_ALONE, *_SHARED),
    serving=tuple(_ALONE),
)
