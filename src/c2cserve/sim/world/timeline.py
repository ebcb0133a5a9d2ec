"""Virtual time: a clock that jumps to whatever is due next."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """Calls in order of time; those of one moment in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call when the clock reads `when` seconds; what lies in the past is due at once."""
        self._order += 1
        heappush(self._heap, (max(when, self.now), self._order, call, args))

    def step(self) -> bool:
        """Jump to the next moment at which anything is due and make all calls of that moment.
        False: nothing is due any more."""
        heap = self._heap
        if not heap:
            return False
        now = self.now = heap[0][0]
        while heap and heap[0][0] <= now:
            _, _, call, args = heappop(heap)
            call(*args)
        return True
