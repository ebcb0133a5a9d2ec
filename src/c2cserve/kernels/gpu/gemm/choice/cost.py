"""The cost model: seconds of one dataflow with given tiles, from the bytes and flops it counts.

    T = overhead + max(link bytes / link rate, flops / matmul rate, HBM bytes / HBM rate)

for one kernel, which overlaps all three; tiles that leave SMs idle lower the matmul rate.
`prefetch` is a pipeline of panels, `tee` a `direct` on the first rows and then a `resident` on the
rest. The model is what lies between measurements: `choose` multiplies it by what the measured
points nearby took over what it says of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from c2cserve.core.tensors import ITEM_BYTES, HalfDtype, Home
from c2cserve.kernels.gpu.gemm.choice.profile import DTYPES, HOMES, AnyDataflow
from c2cserve.kernels.gpu.gemm.choice.rates import Rates
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, Traffic, panels, traffic

OVERHEAD_S: Mapping[AnyDataflow, float] = {
    "resident": 5e-6, "prefetch": 15e-6, "direct": 8e-6, "split": 9e-6, "tee": 14e-6,
    "ring": 12e-6, "sym": 8e-6, "asym": 15e-6, "hybrid": 15e-6, "grouped": 10e-6,
}  # fmt: skip
"""Launches and pipeline fill."""
PANEL_OVERHEAD_S = 4e-6
"""`prefetch`: an event, a copy's start and a cuBLAS launch that does not hide behind another."""

EFFICIENCY: Mapping[AnyDataflow, float] = {
    "resident": 1.0, "prefetch": 1.0, "direct": 0.93, "split": 0.93, "tee": 0.93,
    "ring": 0.93, "sym": 0.85, "asym": 0.40, "hybrid": 0.40, "grouped": 0.90,
}  # fmt: skip
"""Of cuBLAS's rate, where nothing else binds. asym: 4.39 ms where cuBLAS takes 1.71 (H200)."""
_RING_COPIERS = 16
"""CTAs that fill a ring, but no more than a quarter of the slice; their SMs do not multiply."""


@dataclass(frozen=True, slots=True)
class Question:
    """O[m, n] = X[m, k] W[n, k]^T on a slice of `sms` SMs, W at `home`. With `experts`, X has
    `m` tokens, each sent to `top_k` of the `experts` W."""

    m: int
    n: int
    k: int
    dtype: HalfDtype
    home: Home
    sms: int
    experts: int = 0
    top_k: int = 0
    neighbours: int = 0
    """Other slices streaming over the same link."""
    by_map: bool = False
    """The launch is to be replayed with other weights in this one's place, wherever they are
    (`WeightHandle.map_pointer`): only kernels that go by a map in memory will do."""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "sms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        if self.home not in HOMES:
            raise ValueError(f"home must be one of {', '.join(HOMES)}, not {self.home}")
        if self.neighbours < 0 or self.experts < 0:
            raise ValueError("neighbours and experts can not be negative")
        if not min(1, self.experts) <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be within 1 and experts, not {self.top_k}")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def active_experts(self) -> float:
        """How many of the experts a router that prefers none is expected to choose; 1 without."""
        if not self.experts:
            return 1.0
        return self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** self.m)

    @property
    def rows(self) -> int:
        """Rows of X that meet one W: of an active expert, rounded up."""
        if not self.experts:
            return self.m
        return max(1, -int(-self.m * self.top_k // self.active_experts))

    def blocks(self, block_rows: int) -> float:
        """Blocks of `block_rows` rows of X that meet a W, over all experts: what a kernel reads W
        for. An expert's rows are binomial (normal beyond the first block), so at the mean's own
        size every other expert needs a second block."""
        if not self.experts:
            return -(-self.m // block_rows)
        share = self.top_k / self.experts
        mean, deviation = self.m * share, math.sqrt(self.m * share * (1.0 - share))
        expected = self.active_experts / self.experts
        for before in range(block_rows, self.m, block_rows):
            if deviation:
                more = 0.5 * math.erfc((before + 0.5 - mean) / (deviation * math.sqrt(2.0)))
            else:
                more = float(mean > before)
            expected += more
            if more < 1e-9:
                break
        return self.experts * expected


@dataclass(frozen=True, slots=True)
class Terms:
    """Where the modelled time goes. The parts overlap; `seconds` is what comes of them."""

    link_s: float
    compute_s: float
    hbm_s: float
    overhead_s: float
    seconds: float
    traffic: Traffic

    @property
    def bound(self) -> str:
        """The largest part, by name."""
        parts = {"link": self.link_s, "compute": self.compute_s, "HBM": self.hbm_s}
        part = max(parts, key=lambda name: parts[name])
        return part if parts[part] >= self.overhead_s else "fixed overhead"


def modelled(rates: Rates, question: Question, dataflow: AnyDataflow, tiles: Tiles) -> Terms:
    """The model's answer. Raises `ProfileMismatch` when the profile does not know the home."""
    if dataflow == "prefetch":
        return _prefetch(rates, question, tiles)
    if dataflow == "tee" and question.m > tiles.block_rows:
        return _tee(rates, question, tiles)
    return _kernel(rates, question, dataflow, tiles)


def floor_s(rates: Rates, question: Question) -> float:
    """What no dataflow can beat: cuBLAS as if W were in HBM, and W (every active expert's) once
    over the link by the faster of copy engine and SMs; for W in HBM, out of HBM."""
    q = question
    weights = q.active_experts * q.n * q.k * q.item_bytes
    rows = q.m * q.top_k if q.experts else q.m
    x_bytes, o_bytes = rows * q.k * q.item_bytes, rows * q.n * q.item_bytes
    compute_s = q.active_experts * rates.matmul_s(q.rows, q.n, q.k, q.sms)
    if q.home == "hbm":
        return max(compute_s, rates.hbm_s(x_bytes + weights, o_bytes, q.sms))
    slices = q.neighbours + 1
    link_s = weights / rates.fastest_bytes_per_s(q.home, q.sms, slices)
    return max(compute_s, rates.hbm_s(x_bytes, o_bytes, q.sms), link_s)


def _kernel(rates: Rates, q: Question, dataflow: AnyDataflow, tiles: Tiles) -> Terms:
    counted = _counted(q, dataflow, tiles)
    link_s = 0.0
    if counted.link_bytes:
        ctas = min(q.sms, _ctas(q, dataflow, tiles))
        if dataflow == "ring":
            ctas = _ring_copiers(q.sms)
        link_s = counted.link_bytes / rates.read_bytes_per_s(q.home, ctas, q.neighbours + 1)
    compute_s = _compute_s(rates, q, dataflow, tiles)
    hbm_s = rates.hbm_s(counted.hbm_read_bytes, counted.hbm_write_bytes, q.sms)
    overhead_s = OVERHEAD_S[dataflow]
    seconds = overhead_s + max(link_s, compute_s, hbm_s)
    return Terms(link_s, compute_s, hbm_s, overhead_s, seconds, counted)


def _compute_s(rates: Rates, q: Question, dataflow: AnyDataflow, tiles: Tiles) -> float:
    """As long as cuBLAS takes, and no less than whole tiles in whole waves do: a GEMM of few tiles
    leaves SMs idle."""
    cublas_s = q.active_experts * rates.matmul_s(q.rows, q.n, q.k, q.sms)
    efficiency = EFFICIENCY[dataflow]
    if dataflow == "ring":
        efficiency *= 1 - _ring_copiers(q.sms) / max(2, q.sms)
    if dataflow in ("resident", "asym"):
        return cublas_s / efficiency
    if dataflow == "hybrid":
        return cublas_s * (tiles.alpha / EFFICIENCY["sym"] + (1 - tiles.alpha) / efficiency)
    cluster = 1 if dataflow == "sym" else tiles.cluster
    at_once = max(1, q.sms // cluster) * cluster
    waves = -(-_ctas(q, dataflow, tiles) // at_once)
    columns = q.k / cluster if dataflow == "split" else q.k
    tile_s = 2.0 * BW * tiles.bx * columns / (rates.peak_flops_per_s(q.sms) / q.sms)
    return max(cublas_s, waves * tile_s) / efficiency


def _prefetch(rates: Rates, q: Question, tiles: Tiles) -> Terms:
    """A panel is multiplied once it is here and the one before it is done: link time and the last
    panel's compute where the link binds, the first panel's link time and all compute elsewhere."""
    counted = traffic("prefetch", q.m, q.n, q.k, q.item_bytes, tiles)
    bytes_per_s = rates.engine_bytes_per_s(q.home, q.neighbours + 1)
    bounds = panels(q.n, tiles.panel_rows, tiles.panel_growth)
    row_bytes = q.k * q.item_bytes
    row_s = rates.matmul_s(q.m, 1, q.k, q.sms)
    done_s = 0.0
    for start, stop in bounds:
        done_s = max(done_s, stop * row_bytes / bytes_per_s) + (stop - start) * row_s
    hbm_s = rates.hbm_s(counted.hbm_read_bytes, counted.hbm_write_bytes, q.sms)
    overhead_s = OVERHEAD_S["prefetch"] + len(bounds) * PANEL_OVERHEAD_S
    link_s = counted.link_bytes / bytes_per_s
    seconds = overhead_s + max(done_s, hbm_s)
    return Terms(link_s, q.n * row_s, hbm_s, overhead_s, seconds, counted)


def _tee(rates: Rates, q: Question, tiles: Tiles) -> Terms:
    """`direct` on as many rows as one pass over W serves, then cuBLAS out of HBM on the rest."""
    head = _kernel(rates, replace(q, m=tiles.block_rows), "tee", tiles)
    rest = _kernel(rates, replace(q, m=q.m - tiles.block_rows, home="hbm"), "resident", tiles)
    # The overhead of a tee has both launches in it.
    return Terms(
        head.link_s,
        head.compute_s + rest.compute_s,
        head.hbm_s + rest.hbm_s,
        head.overhead_s,
        head.seconds + rest.seconds - rest.overhead_s,
        head.traffic + rest.traffic,
    )


def _counted(q: Question, dataflow: AnyDataflow, tiles: Tiles) -> Traffic:
    """Bytes that reach the link and DRAM: X is read anew for every tile of W, but L2 serves all
    reads but the first (CTAs walk K in step), and likewise a ring's panel to all M blocks but one.
    """
    one = "direct" if dataflow == "grouped" else dataflow
    asked = traffic(one, q.rows, q.n, q.k, q.item_bytes, tiles)
    in_l2 = 0
    if dataflow != "resident":
        in_l2 = (-(-q.n // BW) - 1) * q.rows * q.k * q.item_bytes
    if dataflow == "ring":
        in_l2 += (-(-q.rows // tiles.block_rows) - 1) * q.n * q.k * q.item_bytes
    link_bytes, read_bytes = float(asked.link_bytes), asked.hbm_read_bytes - in_l2
    if dataflow == "grouped":
        link_bytes = q.blocks(tiles.block_rows) / q.active_experts * q.n * q.k * q.item_bytes
    if q.home == "hbm":
        link_bytes, read_bytes = 0, read_bytes + link_bytes
    times = q.active_experts
    return Traffic(
        round(times * link_bytes), round(times * read_bytes), round(times * asked.hbm_write_bytes)
    )


def _ring_copiers(sms: int) -> int:
    return max(1, min(_RING_COPIERS, sms // 4))


def _ctas(q: Question, dataflow: AnyDataflow, tiles: Tiles) -> int:
    """CTAs' worth of output tiles; of CTAs that copy or stay, one on every SM."""
    n_tiles = -(-q.n // BW)
    match dataflow:
        case "split":
            return n_tiles * -(-q.rows // tiles.bx) * tiles.cluster
        case "direct" | "tee" | "ring" | "grouped":
            return math.ceil(n_tiles * q.blocks(tiles.block_rows)) * tiles.cluster
        case "sym":
            return n_tiles * -(-q.rows // tiles.bx)
        case _:
            return q.sms
