"""The cost model: seconds of one dataflow with given tiles, from the bytes and flops it counts.

    T = overhead + max(link bytes / link rate, flops / matmul rate, HBM bytes / HBM rate)

This is for one kernel, which overlaps all three. Tiles that leave SMs idle lower the matmul rate. A
dataflow's record has its model: a `KernelModel`, or a function if it is more than one kernel.
Models fill the gaps between measurements. `choose` corrects them by measured points nearby.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, get_args

from c2cserve.core.tensors import ITEM_BYTES, HalfDtype, Home
from c2cserve.kernels.gpu.gemm.traffic import BW, Tiles, Traffic, ceil_div


class Speeds(Protocol):
    """A machine's speeds, as models need them. `rates.Rates` takes them from a profile."""

    def read_bytes_per_s(self, home: Home, ctas: int, slices: int) -> float: ...

    def engine_bytes_per_s(self, home: Home, slices: int) -> float: ...

    def fastest_bytes_per_s(self, home: Home, sms: int, slices: int) -> float: ...

    def hbm_s(self, read_bytes: float, write_bytes: float, sms: int) -> float: ...

    def matmul_s(self, m: int, n: int, k: int, sms: int) -> float: ...

    def peak_flops_per_s(self, sms: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Question:
    """O[m, n] = X[m, k] W[n, k]^T on a slice of `sms` SMs, with W at `home`.

    With `experts`, X has `m` tokens, and each goes to `top_k` of the `experts` W.
    """

    m: int
    n: int
    k: int
    dtype: HalfDtype
    home: Home
    sms: int
    experts: int = 0
    top_k: int = 0
    neighbours: int = 0
    """Other slices that stream over the same link."""
    by_map: bool = False
    """Whether a graph replays the launch with other weights, at any home. Only kernels that read a
    tensor map in memory (`WeightHandle.map_pointer`) can."""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "sms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in get_args(HalfDtype):
            raise ValueError(
                f"dtype must be one of {', '.join(get_args(HalfDtype))}, not {self.dtype}"
            )
        if self.home not in get_args(Home):
            raise ValueError(f"home must be one of {', '.join(get_args(Home))}, not {self.home}")
        if self.neighbours < 0 or self.experts < 0:
            raise ValueError("neighbours and experts cannot be negative")
        if not min(1, self.experts) <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be within 1 and experts, not {self.top_k}")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def active_experts(self) -> float:
        """The number of experts that a router without preferences is expected to choose; 1 for a
        dense W."""
        if not self.experts:
            return 1.0
        return self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** self.m)

    @property
    def rows(self) -> int:
        """Rows of X that one W multiplies; with experts, those of an active expert, rounded up."""
        if not self.experts:
            return self.m
        return max(1, -int(-self.m * self.top_k // self.active_experts))

    def blocks(self, block_rows: int) -> float:
        """Count the blocks of `block_rows` rows of X, over all experts.

        A kernel reads W once for each block. An expert's rows are binomial (normal beyond the
        first block), so at the mean's own size every other expert needs a second block.
        """
        if not self.experts:
            return ceil_div(self.m, block_rows)
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
    """The parts of the modelled time. They overlap; `seconds` is the time of the whole."""

    link_s: float
    compute_s: float
    hbm_s: float
    overhead_s: float
    seconds: float
    traffic: Traffic

    @property
    def bound(self) -> str:
        """The name of the largest part."""
        parts = {"link": self.link_s, "compute": self.compute_s, "HBM": self.hbm_s}
        part = max(parts, key=lambda name: parts[name])
        return part if parts[part] >= self.overhead_s else "fixed overhead"


def floor_s(speeds: Speeds, question: Question) -> float:
    """Return the time that no dataflow can beat.

    It is the larger of two times. One is that of cuBLAS, as if W were in HBM. The other is that of
    W once over the link, by copy engine or SMs, whichever is faster. With experts, W is every
    active expert's. W in HBM is read from HBM instead.
    """
    q = question
    weights = q.active_experts * q.n * q.k * q.item_bytes
    rows = q.m * q.top_k if q.experts else q.m
    x_bytes, o_bytes = rows * q.k * q.item_bytes, rows * q.n * q.item_bytes
    compute_s = q.active_experts * speeds.matmul_s(q.rows, q.n, q.k, q.sms)
    if q.home == "hbm":
        return max(compute_s, speeds.hbm_s(x_bytes + weights, o_bytes, q.sms))
    slices = q.neighbours + 1
    link_s = weights / speeds.fastest_bytes_per_s(q.home, q.sms, slices)
    return max(compute_s, speeds.hbm_s(x_bytes, o_bytes, q.sms), link_s)


# The parts of models: functions of a question and tiles.


def cublas_s(speeds: Speeds, q: Question) -> float:
    """Return the seconds of cuBLAS with W in HBM, over all active experts."""
    return q.active_experts * speeds.matmul_s(q.rows, q.n, q.k, q.sms)


def tiled_s(
    speeds: Speeds, q: Question, bx: int, cluster: int, ctas: int, *, shared_k: bool = False
) -> float:
    """Return the larger of cuBLAS's time and that of `ctas` CTAs' tiles in whole waves.

    A GEMM of few tiles leaves SMs idle. With `shared_k` a cluster's CTAs share a tile's columns.
    """
    at_once = max(1, q.sms // cluster) * cluster
    waves = ceil_div(ctas, at_once)
    columns = q.k / cluster if shared_k else q.k
    tile_s = 2.0 * BW * bx * columns / (speeds.peak_flops_per_s(q.sms) / q.sms)
    return max(cublas_s(speeds, q), waves * tile_s)


def clustered_ctas(q: Question, tiles: Tiles) -> int:
    """Count the CTAs of output tiles where a cluster lies along M."""
    return math.ceil(ceil_div(q.n, BW) * q.blocks(tiles.block_rows)) * tiles.cluster


def resident_ctas(q: Question, tiles: Tiles) -> int:
    """Count one CTA on every SM: CTAs that copy, or that stay."""
    return q.sms


def x_from_l2(q: Question, tiles: Tiles) -> int:
    """Count the bytes of X that L2 serves.

    Each tile of W reads X anew, and all reads but the first come from L2: CTAs walk K in step.
    """
    return (ceil_div(q.n, BW) - 1) * q.rows * q.k * q.item_bytes


def nothing_from_l2(q: Question, tiles: Tiles) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class KernelModel:
    """The model of one kernel that overlaps link, multiplication and HBM."""

    traffic: Callable[[int, int, int, int, Tiles], Traffic]
    """(m, n, k, bytes of an element, tiles) -> the bytes that the kernel asks for."""
    overhead_s: float
    """Launches and pipeline fill."""
    compute_s: Callable[[Speeds, Question, Tiles], float]
    readers: Callable[[Question, Tiles], int] = resident_ctas
    """CTAs that read the link."""
    from_l2: Callable[[Question, Tiles], int] = x_from_l2
    """Bytes of HBM reads that L2 serves."""
    link_bytes: Callable[[Question, Tiles], float] | None = None
    """Bytes over the link for each active expert, if not those of `traffic`."""

    def __call__(self, speeds: Speeds, q: Question, tiles: Tiles) -> Terms:
        """Return the modelled time. Raises `ProfileMismatch` for a home that was not profiled."""
        counted = self.counted(q, tiles)
        link_s = 0.0
        if counted.link_bytes:
            ctas = min(q.sms, self.readers(q, tiles))
            link_s = counted.link_bytes / speeds.read_bytes_per_s(q.home, ctas, q.neighbours + 1)
        compute_s = self.compute_s(speeds, q, tiles)
        hbm_s = speeds.hbm_s(counted.hbm_read_bytes, counted.hbm_write_bytes, q.sms)
        seconds = self.overhead_s + max(link_s, compute_s, hbm_s)
        return Terms(link_s, compute_s, hbm_s, self.overhead_s, seconds, counted)

    def counted(self, q: Question, tiles: Tiles) -> Traffic:
        """Count the bytes that reach the link and DRAM, over all active experts."""
        asked = self.traffic(q.rows, q.n, q.k, q.item_bytes, tiles)
        link_bytes = float(asked.link_bytes)
        read_bytes = asked.hbm_read_bytes - self.from_l2(q, tiles)
        if self.link_bytes is not None:
            link_bytes = self.link_bytes(q, tiles)
        if q.home == "hbm":
            link_bytes, read_bytes = 0, read_bytes + link_bytes
        times = q.active_experts
        return Traffic(
            round(times * link_bytes),
            round(times * read_bytes),
            round(times * asked.hbm_write_bytes),
        )
