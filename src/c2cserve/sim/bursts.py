"""Decode steps that follow each other as one event: its end is arithmetic unless something
intervenes."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


class Burst:
    """`costs[i]`: work of step `i` (seconds, when nobody shares the slice), the same each time;
    `order`: which step is next, and next, ...; `owed[i]`: times after which a sequence of step `i`
    ends, and all of it with it."""

    def __init__(self, costs: Sequence[float], order: Sequence[int], owed: Sequence[int]) -> None:
        self._order = order
        self.costs = costs
        self._ends = list(accumulate(costs[index] for index in order))
        """Work that is done at the end of each entry of the order."""
        self.length = _until_one_ends(order, owed)
        """Entries that are run."""

    @property
    def work(self) -> float:
        return self._ends[self.length - 1]

    def cut(self, done: float) -> bool:
        """Stop at the end of the step that is under way when `done` of the work is over. False:
        that is where it ends anyhow."""
        length = bisect_right(self._ends, done) + 1
        if length >= self.length:
            return False
        self.length = length
        return True

    def spans(self) -> list[tuple[int, float, float]]:
        """Of each step: how often it runs, and the work done when it ends for the first and the
        last time."""
        if len(self.costs) == 1:
            return [(self.length, self._ends[0], self.work)]
        spans = [(0, 0.0, 0.0)] * len(self.costs)
        for index, end in zip(self._order[: self.length], self._ends, strict=False):
            count, first, _ = spans[index]
            spans[index] = (count + 1, first if count else end, end)
        return spans


def _until_one_ends(order: Sequence[int], owed: Sequence[int]) -> int:
    if len(owed) == 1:
        return min(len(order), owed[0])
    left = list(owed)
    for position, index in enumerate(order):
        left[index] -= 1
        if not left[index]:
            return position + 1
    return len(order)
