"""What a profile says about speeds between the points where they were measured."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
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
"""(x, y) with x rising."""


@dataclass(frozen=True, slots=True)
class _Link:
    engine_bytes_per_s: float
    alone: Curve
    """CTAs -> bytes/s that one slice reads."""
    total: Curve
    """Slices at once -> bytes/s of all of them together."""


class Rates:
    """Bytes per second of links and HBM, seconds of a GEMM, each by who shares and how many SMs."""

    def __init__(self, profile: Profile) -> None:
        self._links = {home: _link(rates) for home, rates in profile.links.items()}
        self._hbm_read = sorted((float(r.sms), r.read_bytes_per_s) for r in profile.hbm)
        self._hbm_write = sorted((float(r.sms), r.write_bytes_per_s) for r in profile.hbm)
        self._row_s = _row_curves(profile.matmul_flops)

    def read_bytes_per_s(self, home: Home, ctas: int, slices: int) -> float:
        """What `ctas` CTAs of one slice read over the link while `slices` slices (it included)
        do. Compute is split, the link is shared: each gets what it asks for up to its share."""
        link = self._link(home)
        return min(_by_count(link.alone, ctas), _total(link, slices) / slices)

    def engine_bytes_per_s(self, home: Home, slices: int) -> float:
        """What the copy engine brings to one slice while others read: its share of a link that
        loses by being shared what it loses for SM reads."""
        link = self._link(home)
        kept = min(1.0, _total(link, slices) / _total(link, 1))
        return link.engine_bytes_per_s * kept / slices

    def fastest_bytes_per_s(self, home: Home, sms: int, slices: int) -> float:
        """The copy engine's rate, or that of as many of the CTAs as read best."""
        measured = [int(ctas) for ctas, _ in self._link(home).alone if ctas < sms]
        reads = (self.read_bytes_per_s(home, ctas, slices) for ctas in [*measured, sms])
        return max(self.engine_bytes_per_s(home, slices), *reads)

    def hbm_s(self, read_bytes: float, write_bytes: float, sms: int) -> float:
        reading_s = read_bytes / _by_count(self._hbm_read, sms)
        return reading_s + write_bytes / _by_count(self._hbm_write, sms)

    def matmul_s(self, m: int, n: int, k: int, sms: int) -> float:
        """cuBLAS with W in HBM. Never less for more rows: the noise of measured rates is evened
        out upwards, and fewer rows than were measured take what the fewest measured did."""
        x = math.log2(m)
        # Rates add up over SMs where times do not: 16 and 32 SMs make 24 by their mean rate.
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
    """Per SM count: log2 of rows -> log2 of their seconds over 2 n k, which is rows over rate."""
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
    """Straight between points, level before the first, and of slope 1 (in proportion) after the
    last."""
    if x >= curve[-1][0]:
        return curve[-1][1] + x - curve[-1][0]
    if x <= curve[0][0]:
        return curve[0][1]
    return _between(curve, x)


def _by_count(curve: Curve, count: float) -> float:
    """Return the value at so many SMs, CTAs or slices.

    It is in proportion up to the first point, straight between points, level after the last.
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
