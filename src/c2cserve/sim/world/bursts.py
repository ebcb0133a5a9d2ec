"""Decode steps that follow each other as one event. Its end is arithmetic unless another event
intervenes."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, repeat


class Burst:
    """A burst of steps that repeat.

    `costs[i]` is the work of step `i` in seconds on an unshared slice, the same each time. `order`
    lists which step runs when. After `remaining[i]` runs a sequence of step `i` ends, and the burst
    with it."""

    def __init__(
        self, costs: Sequence[float], order: Sequence[int], remaining: Sequence[int]
    ) -> None:
        self._order = order
        self.costs = costs
        self.length = _until_one_ends(order, remaining)
        """How many entries run."""
        if len(costs) == 1:
            work: Iterable[float] = repeat(costs[0], self.length)
        else:
            work = map(costs.__getitem__, islice(order, self.length))
        self._ends = list(accumulate(work))
        """Work done at the end of each of them."""

    @property
    def work(self) -> float:
        return self._ends[self.length - 1]

    def cut(self, done: float) -> bool:
        """End the burst with the step that is under way when `done` of the work is over.

        Return whether this shortens it."""
        length = bisect_right(self._ends, done) + 1
        if length >= self.length:
            return False
        self.length = length
        return True

    def runs(self, done: float) -> list[int]:
        """Return how often each step has run when `done` of the work is over."""
        order = self._order[: min(self.length, bisect_right(self._ends, done))]
        return [order.count(number) for number in range(len(self.costs))]

    def spans(self) -> list[tuple[int, float, float]]:
        """Return (runs, work done at the end of its first run, and of its last) of each step."""
        if len(self.costs) == 1:
            return [(self.length, self._ends[0], self.work)]
        order, spans = self._order[: self.length], list[tuple[int, float, float]]()
        backwards = order[::-1]
        for number in range(len(self.costs)):
            count = order.count(number)
            if not count:
                spans.append((0, 0.0, 0.0))
                continue
            last = self.length - 1 - backwards.index(number)
            spans.append((count, self._ends[order.index(number)], self._ends[last]))
        return spans


def _until_one_ends(order: Sequence[int], remaining: Sequence[int]) -> int:
    if len(remaining) == 1:
        return min(len(order), remaining[0])
    length = len(order)
    for number, times in enumerate(remaining):
        if times <= order.count(number):
            loops = (position for position, index in enumerate(order) if index == number)
            length = min(length, next(islice(loops, times - 1, None)) + 1)
    return length
