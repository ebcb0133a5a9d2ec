"""How long loads take on nodes of one kind: a fixed part, and a part for each byte.

    took = fixed + bytes / rate

One node's loads are too few, and seen too late, to tell it from others. Differences that are only
noise would send all models to one node. Loads of small models say what is fixed, and nearly nothing
of the rate. So both are fitted together, from what was believed before and the last loads (ridge
regression, each sample counting less with every later one).
"""

from dataclasses import dataclass

from c2cserve.core.model import ModelSpec
from c2cserve.policy.uses import LOAD_BYTES_PER_S

_FIXED_S = 0.2
"""What a load is believed to take beside its bytes."""
_UNKNOWN_S = 0.25
"""A load's time is not known better than this: nodes report twice a second."""
_SPREAD = 0.2
"""Share of a load's time that it differs by from the next one's."""
_LEFT = 0.95
"""What is left of a sample's weight after the next one: about the last 20 count."""
_GB = 1e9
_BELIEF_GB2 = 0.1
"""The first belief of the rate counts as much as a load of 0.3 GB would."""
_FIXED_BELIEF = 0.1
"""And that of what is fixed as a tenth of a small load."""
_MOST_BYTES_PER_S = 1e12


@dataclass(slots=True)
class LoadTime:
    """Shared by the nodes of one kind."""

    fixed_s: float = _FIXED_S
    bytes_per_s: float = LOAD_BYTES_PER_S
    """Both are believed until they have loaded some."""
    _weight: float = 0.0
    _gb: float = 0.0
    _gb2: float = 0.0
    _s: float = 0.0
    _gb_s: float = 0.0
    """Weighted sums over the last loads: of 1, their size, its square, their time, and size times
    time."""

    def of(self, spec: ModelSpec) -> float:
        return self.fixed_s + spec.weight_bytes / self.bytes_per_s

    def learn(self, spec: ModelSpec, took_s: float) -> None:
        gb = spec.weight_bytes / _GB
        # A large load's time varies by more seconds than a small one's. Weights by what it took
        # would let fast loads count more than slow ones.
        spread_s = _SPREAD * spec.weight_bytes / LOAD_BYTES_PER_S
        weight = _UNKNOWN_S**2 / (_UNKNOWN_S**2 + spread_s**2)
        self._weight = _LEFT * self._weight + weight
        self._gb = _LEFT * self._gb + weight * gb
        self._gb2 = _LEFT * self._gb2 + weight * gb * gb
        self._s = _LEFT * self._s + weight * took_s
        self._gb_s = _LEFT * self._gb_s + weight * gb * took_s
        self._fit()

    def _fit(self) -> None:
        """Solve for both; neither is negative."""
        n, s = self._weight + _FIXED_BELIEF, self._s + _FIXED_BELIEF * _FIXED_S
        gb2 = self._gb2 + _BELIEF_GB2
        gb_s = self._gb_s + _BELIEF_GB2 * _GB / LOAD_BYTES_PER_S
        gb_takes_s = (n * gb_s - self._gb * s) / (n * gb2 - self._gb**2)
        if s < gb_takes_s * self._gb:
            gb_takes_s = gb_s / gb2  # nothing is fixed
        gb_takes_s = max(gb_takes_s, _GB / _MOST_BYTES_PER_S)
        self.fixed_s = max(0.0, (s - gb_takes_s * self._gb) / n)
        self.bytes_per_s = _GB / gb_takes_s
