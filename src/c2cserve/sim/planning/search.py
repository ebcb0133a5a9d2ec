"""Which catalogue a search tries next, between what passed and what failed.

Where the share in time crosses what was asked for is guessed on a straight line between both. A
guess that does not halve what lies between them is followed by the middle.
"""

from dataclasses import dataclass, field
from math import ceil, log2

_CLOSE = 0.02
"""The search ends when the smallest failing catalogue is larger by at most this share."""


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
    _halve: bool = False
    """The last guess was too far from the middle."""

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
        self._halve = before > 0 and not self._halve and self.failed - self.passed > before / 2

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
    def trials_left(self) -> int:
        """About how many trials are to come."""
        gap = max(1, self.failed - self.passed)
        between = ceil(log2(gap / self._stride)) if gap > self._stride else 0
        # A guess takes away more than half. It is an end, too, once the search is over.
        return max(len(self.unconfirmed), ceil(between / 2) + 1 if between else 0)

    @property
    def _stride(self) -> int:
        return max(1, int(self.passed * _CLOSE))

    def _guess(self) -> int:
        low, high, stride = self.passed, self.failed, self._stride
        middle = (low + high) // 2
        above = self._shares.get(low, 1.0) - self.asked
        below = self.asked - self._shares.get(high, 0.0)
        if self._halve or above < 0.0 or below <= 0.0:
            return middle
        guess = round(low + (high - low) * above / (above + below))
        return min(max(guess, low + stride), max(low + 1, high - stride))

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
