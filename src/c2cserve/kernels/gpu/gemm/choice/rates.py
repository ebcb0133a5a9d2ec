"""Speeds between the points that a profile measured."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu.gemm.choice.profile import (
    LinkRates,
    MatmulRate,
    Profile,
    ProfileMismatch,
    ReadRate,
)

Curve = Sequence[tuple[float, float]]
"""Points (x, y) with rising x."""


@dataclass(frozen=True, slots=True)
class _Link:
    engine_bytes_per_s: float
    alone: Curve
    """CTAs -> bytes/s that one slice reads."""
    total: Curve
    """Slices that read at once -> bytes/s of all of them together."""


class Rates:
    """Bytes per second of links and HBM, and seconds of a GEMM.

    They depend on the number of SMs, and on the slices that share a link.
    """

    def __init__(self, profile: Profile) -> None:
        self._links: dict[Home, _Link] = {
            home: _link(rates) for home, rates in profile.links.items()
        }
        self._hbm_read = sorted((float(r.sms), r.read_bytes_per_s) for r in profile.hbm)
        self._hbm_write = sorted((float(r.sms), r.write_bytes_per_s) for r in profile.hbm)
        self._row_s = _row_curves(profile.matmul_flops)

    @property
    def homes(self) -> Collection[Home]:
        """The homes whose links were measured."""
        return self._links.keys()

    def read_bytes_per_s(self, home: Home, ctas: int, slices: int) -> float:
        """Return the rate at which `ctas` CTAs of one slice read a link that `slices` slices share.

        `slices` includes this one. Each gets what its CTAs ask for, up to an equal share.
        """
        link = self._link(home)
        return min(_by_count(link.alone, ctas), _total(link, slices) / slices)

    def engine_bytes_per_s(self, home: Home, slices: int) -> float:
        """Return the copy engine's rate for one of `slices` slices that share a link.

        Sharing makes a link slower in total, by the factor that was measured for reads by SMs.
        """
        link = self._link(home)
        factor = min(1.0, _total(link, slices) / _total(link, 1))
        return link.engine_bytes_per_s * factor / slices

    def fastest_bytes_per_s(self, home: Home, sms: int, slices: int) -> float:
        """Return the larger of the copy engine's rate and that of the best number of CTAs."""
        measured = [int(ctas) for ctas, _ in self._link(home).alone if ctas < sms]
        reads = (self.read_bytes_per_s(home, ctas, slices) for ctas in [*measured, sms])
        return max(self.engine_bytes_per_s(home, slices), *reads)

    def fewest_readers(self, home: Home, share: float) -> int:
        """Return the fewest CTAs that were measured to read a link at `share` of its best rate."""
        alone = self._link(home).alone
        enough = share * max(rate for _, rate in alone)
        return int(next(ctas for ctas, rate in alone if rate >= enough))

    def hbm_s(self, read_bytes: float, write_bytes: float, sms: int) -> float:
        reading_s = read_bytes / _by_count(self._hbm_read, sms)
        return reading_s + write_bytes / _by_count(self._hbm_write, sms)

    def matmul_s(self, m: int, n: int, k: int, sms: int) -> float:
        """Return the seconds of cuBLAS with W in HBM.

        More rows never take less time: where measurements say so by noise, the longer time holds.
        Fewer rows than were measured take as long as the fewest measured.
        """
        x = math.log2(m)
        # Rates, not times, are linear in SMs: 24 SMs have the mean of the rates of 16 and 32.
        rates = [(count, 2.0 ** -_on_curve(curve, x)) for count, curve in self._row_s]
        return 2.0 * n * k / _by_count(rates, sms)

    def peak_flops_per_s(self, sms: int) -> float:
        """Return the rate of the best measured row count."""
        peaks = [(count, 2.0 ** max(x - y for x, y in curve)) for count, curve in self._row_s]
        return _by_count(peaks, sms)

    def _link(self, home: Home) -> _Link:
        if home == "hbm":
            raise ValueError("weights in HBM cross no link")
        if home not in self._links:
            raise ProfileMismatch(
                f"the profile has no link to a {home}: run `c2cserve profile` where there is one"
            )
        return self._links[home]


def _link(rates: LinkRates) -> _Link:
    alone = sorted((float(r.ctas), r.bytes_per_s) for r in rates.reads if r.slices == 1)
    return _Link(rates.to_gpu_bytes_per_s, alone, _totals(rates.reads))


def _totals(reads: Iterable[ReadRate]) -> list[tuple[float, float]]:
    total: dict[int, float] = {}
    for read in reads:
        total[read.slices] = max(total.get(read.slices, 0.0), read.slices * read.bytes_per_s)
    return sorted((float(slices), value) for slices, value in total.items())


def _total(link: _Link, slices: int) -> float:
    return _by_count(link.total, slices)


def _row_curves(rates: Iterable[MatmulRate]) -> list[tuple[float, Curve]]:
    """Return for each number of SMs a curve: log2 of rows -> log2 of their seconds over 2 n k.

    That quotient is rows over rate.
    """
    curves: list[tuple[float, Curve]] = []
    ordered = sorted(rates, key=lambda rate: (rate.sms, rate.m))
    for sms, group in groupby(ordered, key=lambda rate: rate.sms):
        curve: list[tuple[float, float]] = []
        for rate in group:
            y = math.log2(rate.m / rate.flops_per_s)
            curve.append((math.log2(rate.m), max(y, curve[-1][1]) if curve else y))
        curves.append((float(sms), curve))
    return curves


def _on_curve(curve: Curve, x: float) -> float:
    """Return the curve's value at x: linear between points, constant before the first, and of slope
    1 (time in proportion to rows) after the last."""
    if x >= curve[-1][0]:
        return curve[-1][1] + x - curve[-1][0]
    if x <= curve[0][0]:
        return curve[0][1]
    return _between(curve, x)


def _by_count(curve: Curve, count: float) -> float:
    """Return the value at so many SMs, CTAs or slices.

    It is in proportion up to the first point, linear between points, constant after the last.
    """
    if count >= curve[-1][0]:
        return curve[-1][1]
    if count <= curve[0][0]:
        return curve[0][1] * count / curve[0][0]
    return _between(curve, count)


def _between(curve: Curve, x: float) -> float:
    right = bisect_left(curve, x, key=lambda point: point[0])
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
