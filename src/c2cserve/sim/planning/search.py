"""Which catalogue a search tries next, between what passed and what failed.

Where the share in time crosses what was asked for is guessed on a straight line between both. A
guess that does not halve what lies between them is followed by the middle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

_CLOSE = 0.02
"""The search ends when the smallest failing catalogue is larger by at most this share."""
_ROOM = 0.25
"""Part of the requests that may miss. If fewer do, there is much room left."""
_FAR = 4
"""Strides between ends that are worth a trial of one seed in their middle."""


@dataclass(slots=True)
class Search:
    """`passed` and `failed` are numbers of models; 0: there is none."""

    asked: float
    most: int
    passed: int = 0
    failed: int = 0
    complete: set[int] = field(default_factory=set[int])
    """Those that were tried with all seeds to their ends."""
    _shares: dict[int, float] = field(default_factory=dict[int, float])
    _slow: int = 0
    """How many guesses in turn did not halve what lies between the ends."""

    def note(self, models: int, attainment: float, *, passed: bool, complete: bool) -> None:
        """Note a trial."""
        before = self.failed - self.passed
        self._shares[models] = attainment
        if complete:
            self.complete.add(models)
        if passed:
            # What passed beyond a failure says that the failure of one seed was chance.
            again = self.failed <= models
            self.passed = models
            self.failed = self._beyond(models) if self.failed and again else self.failed
        else:
            self.failed = models
            self.passed = self.passed if self.passed < models else self._below(models)
        slowly = before > 0 and self.failed - self.passed > before / 2
        self._slow = self._slow + 1 if slowly else 0

    def revise(self, shares: Mapping[int, float]) -> None:
        """Note what the shares of trials are taken for by now. They may move the ends."""
        self._shares |= shares
        if self._shares.get(self.passed, 1.0) < self.asked and self.passed not in self.complete:
            self.failed, self.passed = self.passed, self._below(self.passed)
        elif self._shares.get(self.failed, 0.0) >= self.asked and self.failed not in self.complete:
            self.passed, self.failed = self.failed, self._beyond(self.failed)

    def next(self) -> int | None:
        """Return how many models to try; None: the search is over."""
        if self.between:
            return self._guess()
        return next(iter(self.unconfirmed), None)

    @property
    def unconfirmed(self) -> list[int]:
        """Return the ends that were not tried with all seeds."""
        ends = (self.passed, self.failed)
        return [count for count in ends if count and count not in self.complete]

    @property
    def between(self) -> bool:
        """Whether the next trial is between both ends. Else it confirms one of them."""
        return self.failed - self.passed > self._stride

    @property
    def middle(self) -> int:
        """Return what is as many times the one end as the other end is of it.

        0: the ends are close, or the one that passed has little room left. A line from there leads
        near to where trials begin to fail."""
        far = self.passed > 0 and self.failed - self.passed > _FAR * self._stride
        room = 1.0 - self._shares.get(self.passed, 1.0) < _ROOM * (1.0 - self.asked)
        return round(sqrt(self.passed * self.failed)) if far and room else 0

    @property
    def _stride(self) -> int:
        return max(1, int(self.passed * _CLOSE))

    def _guess(self) -> int:
        low, high = self.passed, self.failed
        above = self._shares.get(low, 1.0) - self.asked
        below = self.asked - self._shares.get(high, 0.0)
        if above < 0.0 or below <= 0.0:
            return (low + high) // 2
        guess = round(low + (high - low) * above / (above + below))
        step = min(self._stride * 2 ** max(0, self._slow - 1), (high - low) // 2)
        return min(max(guess, low + step), max(low + 1, high - step))

    def _below(self, models: int) -> int:
        """Return the largest smaller catalogue that passed; where none did, half of it."""
        known = self._shares.items()
        smaller = [count for count, share in known if count < models and share >= self.asked]
        return max(smaller, default=models // 2)

    def _beyond(self, models: int) -> int:
        """Return the smallest larger catalogue that failed; else the next to try; 0: none."""
        known = self._shares.items()
        larger = [count for count, share in known if count > models and share < self.asked]
        following = 0 if models >= self.most else min(self.most, models + max(1, models // 4))
        return min(larger, default=following)
