"""How long a step takes, from samples (SLINFER section 6 B).

Prefill grows about linearly with the prompt: 1-D interpolation over lengths. A decode step grows
with the tokens attention reads and with the sequences the rest computes: 2-D interpolation over
(mean length, batch). Samples lie on powers of two, so that a few hundred describe a machine:

    t(L)    = t_i + (L - L_i) / (L_i+1 - L_i) * (t_i+1 - t_i)
    t(B, L) = the same between the rows of the two nearest lengths, each interpolated at B

Beyond the last sample the last two are continued.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

OVERESTIMATE = 1.1
"""Times are taken so many times as long: they fluctuate, and sequences grow while they decode."""
_NEVER_S = float("inf")


class Line:
    """Piecewise linear through samples (x, seconds)."""

    __slots__ = ("_slopes", "_xs", "_ys")

    def __init__(self, samples: Iterable[tuple[float, float]]) -> None:
        """ValueError without samples, or with two of one x."""
        points = sorted(samples)
        self._xs = [x for x, _ in points]
        self._ys = [y for _, y in points]
        if not points or len(set(self._xs)) < len(points):
            raise ValueError("interpolation needs samples, one for each x")
        self._slopes = [max(0.0, (y1 - y0) / (x1 - x0)) for (x0, y0), (x1, y1) in pairwise(points)]
        self._slopes.append(self._slopes[-1] if self._slopes else 0.0)

    def at(self, x: float) -> float:
        """Below the first sample: that one."""
        i = bisect_right(self._xs, x) - 1
        return self._ys[0] if i < 0 else self._ys[i] + (x - self._xs[i]) * self._slopes[i]


class StepTable:
    """One model on one kind of slice."""

    __slots__ = ("_lengths", "_prefill", "_rows")

    measured = True

    def __init__(
        self, prefill: Iterable[tuple[int, float]], decode: Iterable[tuple[int, int, float]]
    ) -> None:
        """Samples as in `events.Profiled`. ValueError if there are none."""
        self._prefill = Line(prefill)
        rows: dict[int, list[tuple[float, float]]] = {}
        for length, batch, seconds in decode:
            rows.setdefault(length, []).append((batch, seconds))
        if not rows:
            raise ValueError("no decode step was sampled")
        self._lengths = sorted(rows)
        self._rows = [Line(rows[length]) for length in self._lengths]

    def prefill_s(self, tokens: int) -> float:
        return self._prefill.at(tokens) if tokens else 0.0

    def decode_s(self, batch: int, length: float) -> float:
        """A step of `batch` sequences of `length` tokens on average."""
        if batch < 1:
            return 0.0
        lengths = self._lengths
        i = bisect_right(lengths, length) - 1
        if i < 0 or len(lengths) == 1:
            return self._rows[max(i, 0)].at(batch)
        i = min(i, len(lengths) - 2)
        low, high = self._rows[i].at(batch), self._rows[i + 1].at(batch)
        share = (length - lengths[i]) / (lengths[i + 1] - lengths[i])
        return low + share * max(0.0, high - low)


class Learned:
    """The same of a model that was not profiled: what its slice measured last. Unknown takes for
    ever. Prompts may take no time of their own, beside weights that cross a link."""

    __slots__ = ("_decode_s", "_token_s")

    def __init__(self, decode_step_s: float = 0.0, prefill_token_s: float = 0.0) -> None:
        measured = decode_step_s > 0.0
        self._decode_s = decode_step_s if measured else _NEVER_S
        self._token_s = prefill_token_s if measured else _NEVER_S

    @property
    def measured(self) -> bool:
        return self._decode_s < _NEVER_S

    def prefill_s(self, tokens: int) -> float:
        return tokens * self._token_s if tokens else 0.0

    def decode_s(self, batch: int, length: float) -> float:
        return self._decode_s if batch else 0.0


Times = StepTable | Learned
UNKNOWN = Learned()
