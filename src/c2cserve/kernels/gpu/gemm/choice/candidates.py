"""Which dataflows, with which of the tiles that are built, can answer a question at all."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from c2cserve.core.tensors import HalfDtype
from c2cserve.kernels.gpu.aot.variants import VARIANTS, Source
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import AnyDataflow
from c2cserve.kernels.gpu.gemm.traffic import BK, BW, Tiles, panels

Candidate = tuple[AnyDataflow, Tiles]

SPLIT_M_MAX = 64
"""Beyond, a cluster has more use for its CTAs along M than along K."""
WHOLE_ROWS = 1 << 20
"""More than any weight has: one panel."""
PREFETCH_PANELS = ((4096, 1), (1024, 1), (2048, 2), (512, 2), (WHOLE_ROWS, 1))
"""Rows of the first panel and growth. Where the link binds, what counts is a short last panel, and
panels of one size; where compute does, a short first one, and few after it. Whole weights (the
last) cost least where the next one's copy overlaps this one's multiplication."""
ALPHAS = (0.25, 0.5, 0.75)
_TMA_ALIGNMENT = 8
"""Elements of 16 bits: TMA wants rows that start at multiples of 16 bytes."""


def candidates(question: Question) -> list[Candidate]:
    """Everything that fits, first what leaves HBM alone, last what was published.

    Never empty but for a K that TMA can not read, with experts or by map. From HBM only `resident`,
    unless by map; with experts only `grouped`, whose router's choice stays on the GPU.
    """
    q, tma = question, question.k % _TMA_ALIGNMENT == 0
    if q.experts:
        return [("grouped", tiles) for tiles in _grouped(q)] if tma else []
    if q.by_map:
        return _by_map(q) if tma else []
    if q.home == "hbm":
        return [("resident", Tiles())]
    prefetched: list[Candidate] = [("prefetch", tiles) for tiles in _prefetch(q)]
    if not tma:
        return prefetched
    found: list[Candidate] = []
    found.extend(("direct", tiles) for tiles in covers(_fitting("direct", q), q.m))
    found.extend(("split", tiles) for tiles in _split(q))
    found += prefetched
    found.extend(("tee", tiles) for tiles in _tee(q))
    found.extend(("ring", tiles) for tiles in _ring(q))
    found.extend(_published(q))
    return found


def covers(tiles: list[Tiles], rows: int) -> list[Tiles]:
    """Those with the smallest cluster x bx >= rows, so W crosses the link once and the fewest rows
    are padding; else the largest. Among equals, small clusters keep more tiles in flight."""
    enough = [one.block_rows for one in tiles if one.block_rows >= rows]
    block_rows = min(enough) if enough else max((one.block_rows for one in tiles), default=0)
    return [one for one in tiles if one.block_rows == block_rows]


@cache
def _built(source: Source, dtype: HalfDtype, *, tee: bool = False) -> tuple[Tiles, ...]:
    """Small clusters first. Partial sums in float32: in 16 bits they are somebody's decision."""
    found = {
        Tiles(bx=one.bx, cluster=one.cluster, kp=one.kp or Tiles().kp)
        for one in VARIANTS
        if (one.source, one.dtype, one.tee) == (source, dtype, tee)
        and one.partial_bytes != 2
        and not one.gated
    }
    return tuple(sorted(found, key=lambda tiles: (tiles.cluster, tiles.bx, tiles.kp)))


def _fitting(source: Source, q: Question, *, tee: bool = False) -> list[Tiles]:
    """Those whose clusters find room on the slice."""
    return [tiles for tiles in _built(source, q.dtype, tee=tee) if tiles.cluster <= q.sms]


def _grouped(q: Question) -> list[Tiles]:
    """For the rows an active expert is expected to have, and for twice as many: a second block
    costs the expert's weights once more."""
    tiles = [t for t in _fitting("grouped", q) if t.cluster == 1 or not q.by_map]
    exact = covers(tiles, q.rows)
    return exact + [one for one in covers(tiles, 2 * q.rows) if one not in exact]


def _by_map(q: Question) -> list[Candidate]:
    """What streams W itself, in whole boxes. From HBM, too: with few rows as fast as cuBLAS, and
    it need not wait for the kernel before it. What reads by most SMs comes first: a kernel that
    starts while another ends runs where SMs happen to be free, and a few of them that lie together
    share their way to memory. (Alone, W [4096, 14336] takes clusters of two 31 us and of three 32;
    in a decode step 39 and 31.)"""
    alone = [tiles for tiles in _fitting("direct", q) if tiles.cluster == 1]
    found: list[Candidate] = [("direct", tiles) for tiles in covers(alone, q.m)]
    found.extend(("split", tiles) for tiles in _split(q))
    column_tiles = -(-q.n // BW)

    def readers(candidate: Candidate) -> int:
        cluster = candidate[1].cluster
        return min(column_tiles, q.sms // cluster) * cluster

    return sorted(found, key=readers, reverse=True)


def _prefetch(q: Question) -> Iterator[Tiles]:
    seen: list[list[tuple[int, int]]] = []
    for panel_rows, growth in PREFETCH_PANELS:
        cut = panels(q.n, panel_rows, growth)
        if cut not in seen:
            seen.append(cut)
            yield Tiles(panel_rows=panel_rows, panel_growth=growth)


def _split(q: Question) -> list[Tiles]:
    """Where there are fewer tiles of W than SMs to read them: the narrowest X that holds all rows,
    shared by as many CTAs as have a k step."""
    if q.m > SPLIT_M_MAX or -(-q.n // BW) >= q.sms:
        return []
    found = [one for one in _fitting("split", q) if one.bx >= q.m and one.cluster * BK <= q.k]
    narrowest = min((one.bx for one in found), default=0)
    return [one for one in found if one.bx == narrowest]


def _tee(q: Question) -> list[Tiles]:
    """For more rows than one pass over W serves: 2,048 with clusters of 8."""
    widest = covers(_fitting("direct", q, tee=True), q.m)
    return [one for one in widest if one.block_rows < q.m]


def _ring(q: Question) -> list[Tiles]:
    """W comes from L2: what counts is how often, so the smallest cover and all that is wider than
    a CTA where there are rows for it. One cluster copies while another multiplies."""
    tiles = [one for one in _fitting("ring", q) if 2 * one.cluster <= q.sms]
    least = covers(tiles, q.m)
    return least + [one for one in tiles if one not in least and one.block_rows <= q.m]


def _published(q: Question) -> Iterator[Candidate]:
    """Algorithm 1 of C2CServe and its two ends, to be compared with."""
    least = covers(_fitting("hybrid", q), q.m)
    yield "sym", replace(least[0], alpha=1.0)
    for tiles in least:
        yield "asym", replace(tiles, alpha=0.0)
    for alpha in ALPHAS:
        yield "hybrid", replace(least[0], alpha=alpha)
