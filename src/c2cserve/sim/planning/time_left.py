"""How long the simulations that are to come will take."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, log, sqrt

_GROWS = 1.5
"""The time of a simulation grows with its models to this power: more requests, and larger batches
of events. (1.9 between 32 and 64 models on one H200, 1.0 where the machine has much room.)"""

Part = tuple[int, int]
"""Models, and how many simulations of so many run side by side before anything else begins."""
_JUMP = 1.3
"""How many times as long as before the time left may become at once."""


@dataclass(slots=True)
class TimeLeft:
    """Foretells times by those of the simulations of about as many models."""

    width: int = 1
    """Simulations at a time."""
    _took: dict[int, float] = field(default_factory=dict[int, float])
    _until_s: float = 0.0
    """When the simulations will have ended, as it was said last."""

    def note(self, models: int, took_s: float) -> None:
        """Note a simulation. One that was cut short is none."""
        before_s = self._took.get(models, took_s)
        self._took[models] = (before_s + took_s) / 2

    def left_s(self, now: Part, later: Iterable[Part], clock_s: float, *, bounded: bool) -> float:
        """Return the seconds that a part under way and later ones take, one after the other.

        `bounded`: it is known between which numbers of models the search goes on. What it still
        needs is a guess that each trial changes. So the answer goes half of the way from the one
        before, as that has run down by now, and not further than `_JUMP`."""
        models, count = now
        found_s = self._one_s(models) * count / self.width
        found_s += sum(
            self._one_s(models) * ceil(count / self.width) for models, count in later if count
        )
        before_s = max(0.0, self._until_s - clock_s)
        if bounded and min(found_s, before_s) > 0.0:
            found_s = before_s * min(max(sqrt(found_s / before_s), 1.0 / _JUMP), _JUMP)
        self._until_s = clock_s + found_s
        return found_s

    def _one_s(self, models: int) -> float:
        """Return the seconds of one simulation, on a curve through the two nearest known ones."""
        if not self._took:
            return 0.0
        below = max((one for one in self._took if one <= models), default=0)
        above = min((one for one in self._took if one >= models), default=0)
        if below and above and below != above:
            power = log(self._took[above] / self._took[below]) / log(above / below)
        else:
            power = _GROWS
        nearest = min(
            (one for one in (below, above) if one), key=lambda one: abs(log(one / models))
        )
        return self._took[nearest] * (models / nearest) ** power
