"""What a slice's loop spends its time on, and what the slice does meanwhile.

    thread   policy | submit | action | poll | sleep ............... | poll | policy | ...
    slice    in flight ........................................ | bubble .... | in flight ...

Each line is a row of laps without gaps: a lap ends where the next one begins.
"""

import time
from collections.abc import Callable, Sequence

Count = Callable[[str, float], None]
"""Adds seconds to the counter of this name."""


class LoopTimes:
    """Not thread-safe. A lap costs less than a microsecond."""

    def __init__(self, count: Count, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._lap_s = self._since_s = clock()
        self._state: Sequence[str] = ()

    def lap(self, name: str) -> None:
        """End a lap of the thread: it was spent on `name`."""
        now = self._clock()
        self._count(name, now - self._lap_s)
        self._lap_s = now

    def slice_is(self, state: Sequence[str]) -> None:
        """Note what counts from now on: the counters whose seconds pass. Count what did before."""
        if state == self._state:
            return
        self._pass(self._clock())
        self._state = state

    def publish(self) -> None:
        """Count the seconds of the present state so far."""
        self._pass(self._clock())

    def _pass(self, now: float) -> None:
        for name in self._state:
            self._count(name, now - self._since_s)
        self._since_s = now
