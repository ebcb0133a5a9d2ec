"""prefetch: copy engines bring W into HBM in panels, and cuBLAS multiplies each as it arrives."""

from collections.abc import Iterator
from functools import cache

from c2cserve.kernels.gpu.gemm.choice.cost import Question, Speeds, Terms
from c2cserve.kernels.gpu.gemm.dataflow import Dataflow, Launch, Reference
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic, panels

WHOLE_ROWS = 1 << 20
"""More rows than any weight has: one panel."""
PREFETCH_PANELS = ((4096, 1), (1024, 1), (2048, 2), (512, 2), (WHOLE_ROWS, 1))
"""Rows of the first panel, and growth.

Where the link binds, a short last panel counts, and panels of one size. Where compute binds, a
short first panel counts, and few after it. Whole weights (the last) cost least where the next
one's copy overlaps this one's multiplication.
"""
OVERHEAD_S = 15e-6
PANEL_OVERHEAD_S = 4e-6
"""An event, a copy's start and a cuBLAS launch that does not hide behind another."""


def _candidates(q: Question) -> Iterator[Tiles]:
    if q.home == "hbm" or q.by_map or q.experts:
        return
    seen: list[list[tuple[int, int]]] = []
    for panel_rows, growth in PREFETCH_PANELS:
        cut = panels(q.n, panel_rows, growth)
        if cut not in seen:
            seen.append(cut)
            yield Tiles(panel_rows=panel_rows, panel_growth=growth)


def _traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    x, w, o = m * k * item_bytes, n * k * item_bytes, m * n * item_bytes
    calls = len(panels(n, tiles.panel_rows, tiles.panel_growth))
    return Traffic(w, calls * x + w, w + o)


def _model(speeds: Speeds, q: Question, tiles: Tiles) -> Terms:
    """Return the time of a pipeline of panels.

    A panel is multiplied once it is here and the one before it is done. Where the link binds, that
    is link time and the last panel's compute. Elsewhere it is the first panel's link time and all
    compute.
    """
    counted = _traffic(q.m, q.n, q.k, q.item_bytes, tiles)
    bytes_per_s = speeds.engine_bytes_per_s(q.home, q.neighbours + 1)
    bounds = panels(q.n, tiles.panel_rows, tiles.panel_growth)
    row_bytes = q.k * q.item_bytes
    row_s = speeds.matmul_s(q.m, 1, q.k, q.sms)
    done_s = 0.0
    for start, stop in bounds:
        done_s = max(done_s, stop * row_bytes / bytes_per_s) + (stop - start) * row_s
    hbm_s = speeds.hbm_s(counted.hbm_read_bytes, counted.hbm_write_bytes, q.sms)
    overhead_s = OVERHEAD_S + len(bounds) * PANEL_OVERHEAD_S
    link_s = counted.link_bytes / bytes_per_s
    seconds = overhead_s + max(done_s, hbm_s)
    return Terms(link_s, q.n * row_s, hbm_s, overhead_s, seconds, counted)


@cache
def _launcher() -> Launch:
    from c2cserve.kernels.gpu.gemm.launchers.staged import prefetch

    return prefetch


def _reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import prefetch

    return prefetch


PREFETCH = Dataflow(
    tile_fields=("panel_rows", "panel_growth"),
    candidates=_candidates,
    traffic=_traffic,
    model=_model,
    launcher=_launcher,
    reference=_reference,
)
