"""How long a plan will take, by going through the rest of it in virtual time.

The same search runs with the results that are known, and with guesses for all others
(`sim.planning.guesses`), on as many processors. So trials, seeds, experiments and what is asked for
besides are all foretold. Several guesses give a range.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from c2cserve.sim.planning.guesses import Guess, Times
from c2cserve.sim.planning.timeline import Foretold, Log

_GUESSES = 15
_WIDER = 1.25
"""Power of the range of the guesses that is said: so few do not reach as far as can be."""
_PART = 0.03
"""Part of the time that may go to foretelling."""
_SURE = 1.5
"""If the longest time left is at most so many times the shortest, it is said as one."""
_SHORT_S = 1.0
"""What does not count."""


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds that are left: from which to which, and about how many."""

    least_s: float = 0.0
    about_s: float = 0.0
    most_s: float = 0.0

    @property
    def sure(self) -> bool:
        """Whether one number says enough."""
        return self.most_s <= max(_SURE * self.least_s, self.least_s + _SHORT_S)

    def after(self, passed_s: float) -> "Left":
        """Return what is left of it after so many seconds."""
        times = (max(0.0, one - passed_s) for one in (self.least_s, self.about_s, self.most_s))
        return Left(*times)

    def __str__(self) -> str:
        if self.sure:
            return f"about {_said(self.about_s)} left"
        least, most = _said(self.least_s), _said(self.most_s)
        unit = most.rpartition(" ")[2]
        return f"{least.removesuffix(f' {unit}')} to {most} left"


def _said(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100.0 else f"{seconds / 60.0:.0f} min"


class TimeLeft:
    def __init__(
        self, log: Log, again: Callable[[Executor], object], asked: float, seeds: int,
        width: int, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """`again` runs the whole plan on another executor. `seeds`: of a whole trial."""
        self._log, self._again = log, again
        self._asked, self._seeds = asked, seeds
        self._width, self._clock = width, clock
        self._left, self._said_s = Left(), 0.0
        self._next_s = 0.0
        """When it may be foretold anew."""

    def now(self) -> Left:
        """Return the time left."""
        now_s = self._clock()
        if now_s < self._next_s:
            return self._left.after(now_s - self._said_s)
        self._left, self._said_s = self._foretold(now_s), now_s
        self._next_s = now_s + (self._clock() - now_s) / _PART
        return self._left

    def _foretold(self, now_s: float) -> Left:
        ended = [
            (one.job, one.result) for one in list(self._log.begun.values())
            if one.result is not None and one.ended_s is not None
        ]  # fmt: skip
        times = Times(ended)
        found: list[float] = []
        for number in range(_GUESSES):
            guess = Guess(ended, times, self._asked, self._seeds, number)
            foretold = Foretold(self._log, guess.of, now_s, self._width)
            self._again(foretold)
            found.append(max(0.0, foretold.now_s - now_s))
        found.sort()
        about_s = found[_GUESSES // 2]
        least_s = about_s * (found[0] / about_s) ** _WIDER if about_s else 0.0
        most_s = about_s * (found[-1] / about_s) ** _WIDER if about_s else found[-1]
        return Left(least_s, about_s, most_s)
