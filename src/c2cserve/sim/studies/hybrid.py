"""Bytes and times of C2CServe's HybridGEMM, with factors calibrated on its figure 4.

O[M, N] = X[M, K] @ W[K, N], 16 bit, X and O in HBM, W in host memory. Figure 4 (M 10240, K 4096,
N 16384, a whole GH200) gives the bytes for both ends of alpha. They tell how often each operand is
moved:

    output-stationary  W: 5.37 GB = 40 x, once per 256 rows   X, O: 1.23 GB = 10.7 x X + O
    weight-stationary  W: 0.13 GB = once                      X, O: 5.18 GB = X + 15.2 x O

The weight-stationary GEMM takes 4.0 ms. Neither 1.3 TB/s of HBM nor its 34 GB/s of the link explain
this: it computes at 343 TFLOP/s, 46 % of what large GEMMs reach. The output-stationary GEMM takes
16.4 ms: one instance alone reads 327 GB/s of the 384 GB/s that host memory has for all. Both run
side by side on shares alpha and 1 - alpha of the SMs, and their transfers overlap.
"""

from dataclasses import dataclass

from c2cserve.sim.world.hardware import SimulatedSlice

ALONE_BYTES_PER_S = 327e9
"""The most that one instance reads over the link: 5.37 GB in 16.4 ms."""
_ROWS_PER_READ = 256
_X_READS_SYM = 10.7
_O_WRITES_ASYM = 15.2
_ASYM_SHARE = 343 / 740
"""Share of the compute that large GEMMs reach."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One GEMM (or many of one shape): bytes on the link and in HBM, seconds of tensor cores."""

    link_bytes: float
    hbm_bytes: float
    compute_s: float

    def alone_s(self, link_bytes_per_s: float, hbm_bytes_per_s: float) -> float:
        """Return the time with these bandwidths. Everything overlaps, and the slowest decides."""
        link_s = self.link_bytes / min(link_bytes_per_s, ALONE_BYTES_PER_S)
        return max(link_s, self.hbm_bytes / hbm_bytes_per_s, self.compute_s)


@dataclass(frozen=True, slots=True)
class GemmShape:
    n: int
    k: int
    count: int = 1

    def moved(self, m: int, alpha: float, simulated: SimulatedSlice) -> Moved:
        """Return the cost with a share `alpha` of the columns output-stationary."""
        w, x, o = (2.0 * size * self.count for size in (self.n * self.k, m * self.k, m * self.n))
        reads = -(-m // _ROWS_PER_READ)
        flops = 2.0 * m * self.n * self.k * self.count
        return Moved(
            link_bytes=w * (alpha * reads + 1 - alpha),
            hbm_bytes=alpha * (_X_READS_SYM * x + o) + (1 - alpha) * (x + _O_WRITES_ASYM * o),
            compute_s=flops * (alpha + (1 - alpha) / _ASYM_SHARE) / simulated.flops,
        )
