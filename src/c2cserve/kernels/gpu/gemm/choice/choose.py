"""The choice of a dataflow by measurements, with a cost model between the measured points."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from c2cserve.core.tensors import HalfDtype, Home
from c2cserve.kernels.gpu.aot.variants import BX_SPLIT
from c2cserve.kernels.gpu.gemm.choice.candidates import candidates
from c2cserve.kernels.gpu.gemm.choice.cost import Question, Terms, floor_s
from c2cserve.kernels.gpu.gemm.choice.profile import Point, Profile, TileValues, tile_values
from c2cserve.kernels.gpu.gemm.choice.rates import Rates
from c2cserve.kernels.gpu.gemm.dataflows.prefetch import WHOLE_ROWS
from c2cserve.kernels.gpu.gemm.dataflows.table import DATAFLOWS, DataflowName, modelled
from c2cserve.kernels.gpu.gemm.traffic import Tiles

_NEAREST = 8
"""The number of points that make up a correction. Their weights reach 0 at the distance of the next
point, so a prediction does not jump when one point takes another's place."""
_CACHED = 4096
"""The number of cached answers: the linears of many models times the row counts of their steps."""

_SATURATED = 0.96
"""CTAs that read a link at this share of its best rate are enough: more would hardly read faster.
"""

_NEAR = 1.03
"""Predictions within this factor count as equal. Of equal ones, the first of `candidates` is taken.
"""

Basis = Literal["measured", "interpolated", "modelled"]
"""What a prediction rests on.

    measured      this question was measured
    interpolated  points of this dataflow and these tiles were measured on such a slice
    modelled      neither: the model, corrected by the nearest points if there are any
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted time of one dataflow with certain tiles."""

    dataflow: DataflowName
    tiles: Tiles
    predicted_s: float
    terms: Terms
    basis: Basis
    tried: bool
    """Whether the profile has measured this dataflow from this home."""

    @property
    def factor(self) -> float:
        """The factor by which measured points correct the model."""
        return self.predicted_s / self.terms.seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """The pick for one question."""

    dataflow: DataflowName
    tiles: Tiles
    predicted_s: float
    floor_s: float
    terms: Terms
    basis: Basis
    next_best: Estimate | None
    """The best of another dataflow."""

    @property
    def why(self) -> str:
        """The reason for the choice, in one sentence."""
        ratio = self.predicted_s / self.floor_s
        said = (
            f"{describe(self.dataflow, self.tiles)} is {self.basis} at {_shown(self.predicted_s)}, "
            f"{ratio:.2f}x the floor, bound by {self.terms.bound} ({_parts(self.terms)})"
        )
        if self.next_best is None:
            return f"{said}; nothing else fits."
        other = self.next_best
        return (
            f"{said}; the next best, {describe(other.dataflow, other.tiles)}, is {other.basis} at "
            f"{_shown(other.predicted_s)}, bound by {other.terms.bound} ({_parts(other.terms)})."
        )


ROWS_STREAMED = max(BX_SPLIT)
"""Up to this number of rows, a slice multiplies with kernels that stream W themselves."""
_ROWS_ASKED = 16
_WHOLE = Tiles(panel_rows=WHOLE_ROWS, panel_growth=1)


class NothingFits(ValueError):
    """No dataflow can compute this. The message says why."""


class Chooser:
    """Chooses dataflows by one profile. It needs no GPU.

    A new question takes a fraction of a millisecond, and a repeated one a dictionary look-up.
    """

    def __init__(self, profile: Profile) -> None:
        self._rates = Rates(profile)
        self._corrections = _Corrections(self._rates, profile.points)
        self._cached_pick = lru_cache(_CACHED)(self._pick)

    def pick(self, question: Question) -> Choice:
        """Return the fastest of the dataflows that were measured on this machine.

        Raises `NothingFits`, and `ProfileMismatch` for a home that the profile does not have.
        """
        return self._cached_pick(question)

    def serving(self, question: Question) -> tuple[DataflowName, Tiles]:
        """Return what a slice launches: the fastest of what gives the same bits for W at any home.

            up to `ROWS_STREAMED` rows    a kernel that streams W itself
            more rows                     cuBLAS, with W in HBM or brought there by a copy engine

        The kernel is picked for few rows and W in HBM, whatever the question's are. So a row's sums
        do not depend on the other rows either. Raises as `pick`.
        """
        q = question
        if q.experts:
            return "grouped", self.pick(replace(q, by_map=True)).tiles
        if q.m > ROWS_STREAMED or q.k % 8:
            return ("resident", Tiles()) if q.home == "hbm" else ("prefetch", _WHOLE)
        few = Question(_ROWS_ASKED, q.n, q.k, q.dtype, "hbm", q.sms, by_map=True)
        choice = self.pick(few)
        bx = next(bx for bx in BX_SPLIT if bx >= q.m)
        return choice.dataflow, Tiles(bx=bx, cluster=choice.tiles.cluster)

    def estimates(self, question: Question) -> list[Estimate]:
        """Return every candidate, the fastest first, and equals in the order of `candidates`."""
        found = [
            self._corrections.estimate(question, dataflow, tiles)
            for dataflow, tiles in candidates(question)
        ]
        return sorted(found, key=lambda estimate: estimate.predicted_s)

    def estimate(self, question: Question, dataflow: DataflowName, tiles: Tiles) -> Estimate:
        """Return the time of one dataflow, whether or not it is a candidate. Raises as `pick`."""
        return self._corrections.estimate(question, dataflow, tiles)

    def hbm_bytes_per_s(self, sms: int) -> float:
        """Return the rate at which so many SMs read HBM, while nothing else does."""
        return 1.0 / self._rates.hbm_s(1.0, 0.0, sms)

    def link_bytes_per_s(self, home: Home) -> float:
        """Return the copy engines' rate from a home, all slices together.

        Raises `ProfileMismatch`.
        """
        return self._rates.engine_bytes_per_s(home, 1)

    def readers(self) -> dict[Home, int]:
        """Return, for each link of the profile, the fewest CTAs that saturate it."""
        return {home: self._rates.fewest_readers(home, _SATURATED) for home in self._rates.homes}

    def floor_s(self, question: Question) -> float:
        return floor_s(self._rates, question)

    def _pick(self, question: Question) -> Choice:
        found = self.estimates(question)
        if not found:
            raise NothingFits(f"K = {question.k} is not a multiple of 8, which streaming needs")
        # Untried dataflows are only a last resort: no measurement corrects their model.
        trusted = [estimate for estimate in found if estimate.tried] or found
        near = [one for one in trusted if one.predicted_s <= _NEAR * trusted[0].predicted_s]
        order = {candidate: i for i, candidate in enumerate(candidates(question))}
        best = min(near, key=lambda one: order[one.dataflow, one.tiles])
        others = (other for other in trusted if other.dataflow != best.dataflow)
        return Choice(
            best.dataflow,
            best.tiles,
            best.predicted_s,
            self.floor_s(question),
            best.terms,
            best.basis,
            next(others, None),
        )


@dataclass(frozen=True, slots=True)
class _Context:
    """All of a question but the GEMM's size. A correction is made of points of the same or the
    nearest context."""

    sms: int
    neighbours: int
    dtype: HalfDtype
    experts: int
    top_k: int

    def apart(self, other: "_Context") -> float:
        return (
            abs(math.log2(self.sms / other.sms))
            + abs(math.log2((1 + self.neighbours) / (1 + other.neighbours)))
            + abs(math.log2((1 + self.experts) / (1 + other.experts)))
            + abs(math.log2((1 + self.top_k) / (1 + other.top_k)))
            + 0.25 * (self.dtype != other.dtype)
        )


_Place = tuple[float, float, float]
"""log2 of m, n and k."""


@dataclass(frozen=True, slots=True)
class _MeasuredPoints:
    """The measured points of one context: their places, and log2 of measured over modelled time."""

    places: list[_Place] = field(default_factory=list[_Place])
    corrections: list[float] = field(default_factory=list[float])


_Series = dict[_Context, _MeasuredPoints]


class _Corrections:
    """The model's corrections by measured points, for each dataflow, home, tiles and context."""

    def __init__(self, rates: Rates, points: Iterable[Point]) -> None:
        self._rates = rates
        self._measured_s: dict[tuple[Question, DataflowName, TileValues], float] = {}
        self._series: dict[tuple[DataflowName, Home], dict[TileValues, _Series]] = {}
        for point in points:
            question, values = _question(point), tile_values(point.dataflow, point.tiles)
            modelled_s = modelled(rates, question, point.dataflow, point.tiles).seconds
            self._measured_s[question, point.dataflow, values] = point.seconds
            by_tiles = self._series.setdefault((point.dataflow, point.home), {})
            series = by_tiles.setdefault(values, {})
            measured = series.setdefault(_context(question), _MeasuredPoints())
            measured.places.append(_place(question))
            measured.corrections.append(math.log2(point.seconds / modelled_s))

    def estimate(self, question: Question, dataflow: DataflowName, tiles: Tiles) -> Estimate:
        question = replace(question, by_map=False)  # the same kernels take the same time
        terms = modelled(self._rates, question, dataflow, tiles)
        values = tile_values(dataflow, tiles)
        by_tiles = self._series.get((dataflow, question.home))
        if by_tiles is None:
            return Estimate(dataflow, tiles, terms.seconds, terms, "modelled", tried=False)
        measured_s = self._measured_s.get((question, dataflow, values))
        if measured_s is not None:
            return Estimate(dataflow, tiles, measured_s, terms, "measured", tried=True)
        context = _context(question)
        series = by_tiles.get(values)
        basis: Basis = "interpolated" if series and context in series else "modelled"
        if series is None:
            # For tiles that were never run, the model's error is taken from the most similar ones.
            series = by_tiles[min(by_tiles, key=lambda other: _apart(values, other))]
        measured = series.get(context) or series[min(series, key=context.apart)]
        predicted_s = terms.seconds * 2.0 ** _interpolated(measured, _place(question))
        return Estimate(dataflow, tiles, predicted_s, terms, basis, tried=True)


def _interpolated(measured: _MeasuredPoints, place: _Place) -> float:
    """Return log2 of the correction at `place`, from the nearest points.

    Points weigh by inverse squared distance. The weights fall to 0 at the distance of the first
    point that is left out (Franke and Little).
    """
    apart = [math.dist(where, place) for where in measured.places]
    reach = sorted(apart)[: _NEAREST + 1][-1]
    pairs = zip(apart, measured.corrections, strict=True)
    nearest = sorted(pair for pair in pairs if pair[0] <= reach)[: _NEAREST + 1]
    if nearest[0][0] == 0.0:
        return nearest[0][1]
    outside = 1.0 / nearest.pop()[0] if len(nearest) > _NEAREST else 0.0
    weights = [(1.0 / distance - outside) ** 2 for distance, _ in nearest]
    total = math.fsum(weights)
    if total == 0.0:
        return math.fsum(correction for _, correction in nearest) / len(nearest)
    pairs = zip(weights, nearest, strict=True)
    return math.fsum(weight * correction for weight, (_, correction) in pairs) / total


def _question(point: Point) -> Question:
    return Question(
        point.m, point.n, point.k, point.dtype, point.home, point.sms, point.experts, point.top_k,
        point.neighbours,
    )  # fmt: skip


def _place(question: Question) -> _Place:
    return math.log2(question.m), math.log2(question.n), math.log2(question.k)


def _context(q: Question) -> _Context:
    return _Context(q.sms, q.neighbours, q.dtype, q.experts, q.top_k)


def _apart(values: TileValues, others: TileValues) -> float:
    pairs = zip(values, others, strict=True)
    return math.fsum(abs(math.log2((1 + one) / (1 + other))) for one, other in pairs)


def describe(dataflow: DataflowName, tiles: Tiles) -> str:
    """Return the dataflow and its tiles as in `direct (bx 256, cluster 8)`."""
    said = describe_tiles(dataflow, tiles)
    return f"{dataflow} ({said})" if said else dataflow


def describe_tiles(dataflow: DataflowName, tiles: Tiles) -> str:
    """Return the tiles that this dataflow reads, as in `bx 256, cluster 8`; empty for none."""
    if dataflow == "prefetch" and tiles.panel_rows >= WHOLE_ROWS:
        return "whole"
    names = (name.replace("_", " ") for name in DATAFLOWS[dataflow].tile_fields)
    values = tile_values(dataflow, tiles)
    return ", ".join(f"{name} {value:g}" for name, value in zip(names, values, strict=True))


def _parts(terms: Terms) -> str:
    return (
        f"link {_shown(terms.link_s)}, compute {_shown(terms.compute_s)}, "
        f"HBM {_shown(terms.hbm_s)}, fixed {_shown(terms.overhead_s)}"
    )


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
