"""How long the simulations that are to come will take."""

from dataclasses import dataclass, field
from math import ceil

_GROWS = 1.5
"""The time of a simulation grows with its models to this power: more requests, and larger batches
of events. (1.9 between 32 and 64 models on one H200, 1.0 where the machine has much room.)"""


@dataclass(slots=True)
class TimeLeft:
    """Foretells times by those of the last simulations of about as many models."""

    width: int = 1
    """Simulations at a time."""
    _took: dict[int, float] = field(default_factory=dict[int, float])

    def note(self, models: int, took_s: float) -> None:
        """Note a simulation. One that was cut short is none."""
        before_s = self._took.get(models, took_s)
        self._took[models] = (before_s + took_s) / 2

    def of(self, models: int, simulations: int) -> float:
        """Return the seconds of so many simulations of so many models, side by side."""
        if not self._took or not simulations:
            return 0.0
        nearest = min(self._took, key=lambda known: abs(known - models))
        one_s = self._took[nearest] * (models / nearest) ** _GROWS
        return one_s * ceil(simulations / self.width)
