"""The share in time of a catalogue, expected from fewer seeds than all.

Seeds differ more than catalogues of about as many models do by one seed. So a catalogue is compared
with the nearest one that all seeds have simulated, seed by seed:

    share(models) = share(nearest) + mean over its seeds of (their share - their share of nearest)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import fmean, stdev

_SURE = 2.0
"""Standard errors between what is expected and what was asked for."""
_ENOUGH = 4
"""Differences that the deviation of one is known from. With fewer it is that between seeds."""
_OTHER = 0.1
"""A share that differs by more from what was asked for is none to compare others with."""
_LEAST = 0.002
"""Deviation of a difference, at least."""


@dataclass(slots=True)
class Estimates:
    seeds: int
    """Seeds of a whole trial."""
    _shares: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    """Models -> seed -> share in time."""

    def note(self, models: int, seed: int, share: float) -> None:
        """Note a simulation that was not cut short."""
        self._shares.setdefault(models, {})[seed] = share

    def all(self) -> dict[int, float]:
        """Return what is expected of each catalogue."""
        return {models: self.expected(models) for models in self._shares}

    def expected(self, models: int) -> float:
        """Return the mean over all seeds, as far as it can be foretold. Raises KeyError."""
        shares = self._shares[models]
        nearest = self._nearest(models)
        if nearest is None or len(shares) == self.seeds:
            return fmean(shares.values())
        there = self._shares[nearest]
        return fmean(there.values()) + fmean(self._differences(shares, there))

    def surely(self, models: int, asked: float) -> bool:
        """Whether it is sure on which side of `asked` the mean over all seeds is.

        The first catalogue near it is simulated with all of them: others are compared with it."""
        shares = self._shares.get(models)
        if shares is None:
            return False
        left = self.seeds - len(shares)
        if not left:
            return True
        distance = abs(self.expected(models) - asked)
        if self._nearest(models) is None:
            return distance > _OTHER and sum(shares.values()) + left < asked * self.seeds
        return distance > self._error(models)

    def _error(self, models: int) -> float:
        """Return twice the standard error of what is expected. The seeds are a part of all."""
        nearest = self._nearest(models)
        if nearest is None:
            return inf
        count = len(self._shares[models])
        deviation = max(_LEAST, self._deviation(self._shares[nearest]))
        return _SURE * deviation * sqrt(1.0 / count - 1.0 / self.seeds)

    def _deviation(self, whole: Mapping[int, float]) -> float:
        """Return the deviation of a seed's difference from the mean difference."""
        squares, freedom = 0.0, 0
        for models, shares in self._shares.items():
            nearest = self._nearest(models)
            if nearest is None or len(shares) < 2:
                continue
            found = self._differences(shares, self._shares[nearest])
            middle = fmean(found)
            squares += sum((one - middle) ** 2 for one in found)
            freedom += len(found) - 1
        return sqrt(squares / freedom) if freedom >= _ENOUGH else stdev(whole.values())

    def _nearest(self, models: int) -> int | None:
        """Return the nearest other catalogue that all seeds have simulated; None: there is none."""
        whole = [
            one for one, shares in self._shares.items()
            if len(shares) == self.seeds > 1 and one != models
        ]  # fmt: skip
        return min(whole, key=lambda one: abs(one - models), default=None)

    @staticmethod
    def _differences(shares: Mapping[int, float], there: Mapping[int, float]) -> list[float]:
        return [share - there[seed] for seed, share in shares.items()]
