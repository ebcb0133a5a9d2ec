"""ring: W in panels through a few places of local memory, small enough to stay in L2."""

from functools import cache

from c2cserve.kernels.gpu.aot.variants import DTYPES, Variant
from c2cserve.kernels.gpu.gemm.choice.cost import (
    KernelModel,
    Question,
    Speeds,
    clustered_ctas,
    tiled_s,
    x_from_l2,
)
from c2cserve.kernels.gpu.gemm.dataflow import (
    Dataflow,
    Launch,
    Reference,
    covers,
    streams,
    tiles_of,
)
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, Traffic, ceil_div, ring_copiers

_EFFICIENCY = 0.93
"""Share of cuBLAS's rate, where nothing else binds."""

_VARIANTS = [
    Variant("ring", dtype, bx, cluster)
    for dtype in DTYPES
    for bx, cluster in ((128, 1), (256, 1), (256, 2), (256, 4))
]
_BUILT = tiles_of(_VARIANTS)


def _candidates(q: Question) -> list[Tiles]:
    """Return the smallest cover, and all wider tiles that there are rows for.

    W comes from L2, so what counts is how often. One cluster copies while another multiplies.
    """
    if not streams(q):
        return []
    tiles = [one for one in _BUILT[q.dtype] if 2 * one.cluster <= q.sms]
    least = covers(tiles, q.m)
    return least + [one for one in tiles if one not in least and one.block_rows <= q.m]


def _traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    w, m_blocks = n * k * item_bytes, ceil_div(m, tiles.block_rows)
    reads = ceil_div(n, BW) * m * k * item_bytes + m_blocks * w
    return Traffic(w, reads, w + m * n * item_bytes)


def _copiers(q: Question, tiles: Tiles) -> int:
    return ring_copiers(q.sms)


def _compute_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    """The copiers' SMs do not multiply."""
    efficiency = _EFFICIENCY * (1 - ring_copiers(q.sms) / max(2, q.sms))
    return tiled_s(speeds, q, tiles.bx, tiles.cluster, clustered_ctas(q, tiles)) / efficiency


def _from_l2(q: Question, tiles: Tiles) -> int:
    """L2 serves a panel to all blocks of rows but one, and X as usual."""
    again = ceil_div(q.rows, tiles.block_rows) - 1
    return x_from_l2(q, tiles) + again * q.n * q.k * q.item_bytes


@cache
def _launcher() -> Launch:
    from c2cserve.kernels.gpu.gemm.launchers.staged import ring

    return ring


def _reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import ring

    return ring


RING = Dataflow(
    tile_fields=("bx", "cluster", "panel_rows", "slots"),
    candidates=_candidates,
    traffic=_traffic,
    model=KernelModel(_traffic, 12e-6, _compute_s, readers=_copiers, from_l2=_from_l2),
    launcher=_launcher,
    reference=_reference,
    variants=tuple(_VARIANTS),
)
