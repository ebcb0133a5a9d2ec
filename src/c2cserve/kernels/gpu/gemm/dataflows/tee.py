"""tee: `direct` on the first rows, which keeps W in HBM as it passes; cuBLAS on the other rows."""

from dataclasses import replace
from functools import cache

from c2cserve.kernels.gpu.aot.variants import DTYPES, Variant
from c2cserve.kernels.gpu.gemm.choice.cost import (
    KernelModel,
    Question,
    Speeds,
    Terms,
    clustered_ctas,
    tiled_s,
)
from c2cserve.kernels.gpu.gemm.dataflow import (
    Dataflow,
    Launch,
    Reference,
    covers,
    fitting,
    streams,
    tiles_of,
)
from c2cserve.kernels.gpu.gemm.dataflows.resident import RESIDENT
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, Traffic, ceil_div

_EFFICIENCY = 0.93
"""Share of cuBLAS's rate, where nothing else binds."""

_VARIANTS = [
    Variant("direct", dtype, 256, cluster, tee=True) for dtype in DTYPES for cluster in (4, 8)
]
_BUILT = tiles_of(_VARIANTS)


def _candidates(q: Question) -> list[Tiles]:
    """Return the widest tiles if one pass over W does not serve all rows."""
    if not streams(q):
        return []
    widest = covers(fitting(_BUILT[q.dtype], q.sms), q.m)
    return [one for one in widest if one.block_rows < q.m]


def _traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    w, o, head = n * k * item_bytes, m * n * item_bytes, min(m, tiles.block_rows)
    rest = Traffic(0, (m - head) * k * item_bytes + w) if m > head else Traffic()
    return Traffic(w, ceil_div(n, BW) * head * k * item_bytes, w + o) + rest


def _compute_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    ctas = clustered_ctas(q, tiles)
    return tiled_s(speeds, q, tiles.bx, tiles.cluster, ctas) / _EFFICIENCY


_HEAD = KernelModel(_traffic, 14e-6, _compute_s, readers=clustered_ctas)


def _model(speeds: Speeds, q: Question, tiles: Tiles) -> Terms:
    """Add up as many rows as one pass over W serves, and cuBLAS out of HBM on the rest."""
    if q.m <= tiles.block_rows:
        return _HEAD(speeds, q, tiles)
    head = _HEAD(speeds, replace(q, m=tiles.block_rows), tiles)
    rest = RESIDENT.model(speeds, replace(q, m=q.m - tiles.block_rows, home="hbm"), tiles)
    # The overhead of a tee has both launches in it.
    return Terms(
        head.link_s,
        head.compute_s + rest.compute_s,
        head.hbm_s + rest.hbm_s,
        head.overhead_s,
        head.seconds + rest.seconds - rest.overhead_s,
        head.traffic + rest.traffic,
    )


@cache
def _launcher() -> Launch:
    from c2cserve.kernels.gpu.gemm.launchers.staged import tee

    return tee


def _reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import tee

    return tee


TEE = Dataflow(
    tile_fields=("bx", "cluster"),
    candidates=_candidates,
    traffic=_traffic,
    model=_model,
    launcher=_launcher,
    reference=_reference,
    variants=tuple(_VARIANTS),
)
