"""A token bucket. The time is handed in, so its arithmetic is a pure function of its calls."""

import math

_EPSILON = 1e-6
"""Tolerance for the rounding of a level that was refilled in many small parts."""


class TokenBucket:
    """Holds at most `per_minute` units, and is refilled evenly by as many each minute.

    Callers that ask `wait_s` first take at most `per_minute * (1 + t / 60)` units between two
    moments `t` seconds apart. `take` itself never refuses. Usage that is known only afterwards may
    bring the level below zero; callers that ask then wait until that debt is refilled.
    Moments are seconds of any one clock; a moment before the last one counts as the last one.
    """

    __slots__ = ("_as_of_s", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._as_of_s = now

    def level(self, now: float) -> float:
        """Return the units in the bucket; negative for a debt."""
        self._refill(now)
        return self._level

    def remaining(self, now: float) -> int:
        """Return the whole units that can be taken without a debt."""
        return max(0, math.floor(self.level(now) + _EPSILON))

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket has `amount` units: 0 if it has them now, infinity if
        they are more than it can hold."""
        if amount > self.per_minute:
            return math.inf
        missing = amount - self.level(now)
        return 0.0 if missing <= _EPSILON else missing * 60.0 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Return units that were taken and not used."""
        self._refill(now)
        self._level = min(self.per_minute, self._level + amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the size and the rate. What was used stays used: a larger bucket fills up at its
        new rate from the level of the old one."""
        self._refill(now)
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def _refill(self, now: float) -> None:
        if now > self._as_of_s:
            gained = (now - self._as_of_s) * self.per_minute / 60.0
            self._level = min(float(self.per_minute), self._level + gained)
            self._as_of_s = now
