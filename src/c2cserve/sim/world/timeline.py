"""Virtual time: a clock that jumps to the next event."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """Calls in order of time. Calls of one moment run in the order of their registration."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call at `when` seconds, or at once if this is past."""
        self._order += 1
        heappush(self._heap, (max(when, self.now), self._order, call, args))

    def step(self) -> bool:
        """Jump to the next moment that has calls, and make all of them.

        Return False if there are no calls left."""
        heap = self._heap
        if not heap:
            return False
        now = self.now = heap[0][0]
        while heap and heap[0][0] <= now:
            _, _, call, args = heappop(heap)
            call(*args)
        return True
