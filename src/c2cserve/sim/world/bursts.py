"""Decode steps that follow each other as one event. Its end is arithmetic unless another event
intervenes."""

from collections.abc import Sequence

from c2cserve.core.step import SeqStep
from c2cserve.sim.world.checks import SeqState

Parts = list[tuple[SeqStep, SeqState]]
"""The sequences of a step."""


class Burst:
    """A burst of steps that repeat.

    `costs[i]` is the work of step `i` in seconds on an unshared slice, the same each time. `order`
    lists which step runs when. After `remaining[i]` runs a sequence of step `i` ends, and the burst
    with it."""

    def __init__(
        self, costs: list[float], order: tuple[int, ...], remaining: Sequence[int]
    ) -> None:
        self._order = order
        self.costs = costs
        self.length = _until_one_ends(order, remaining)
        """How many entries run."""
        self.work = self._done_after(self.length)

    def _done_after(self, entries: int) -> float:
        """Return the work done at the end of so many entries.

        (Sums are made again where they are asked for. To keep them all takes longer.)"""
        costs, done = self.costs, 0.0
        if len(costs) == 1:
            each = costs[0]
            for _ in range(entries):
                done += each
        else:
            order = self._order
            for position in range(entries):
                done += costs[order[position]]
        return done

    def _over(self, done: float) -> int:
        """Return how many entries have ended when `done` of the work is over."""
        costs, order, end = self.costs, self._order, 0.0
        for position in range(self.length):
            end += costs[order[position]]
            if end > done:
                return position
        return self.length

    def cut(self, done: float) -> bool:
        """End the burst with the step that is under way when `done` of the work is over.

        Return whether this shortens it."""
        length = self._over(done) + 1
        if length >= self.length:
            return False
        self.length = length
        self.work = self._done_after(length)
        return True

    def runs(self, done: float) -> list[int]:
        """Return how often each step has run when `done` of the work is over."""
        return times_of(self._order[: self._over(done)], len(self.costs))

    def spans(self) -> list[tuple[int, float, float]]:
        """Return (runs, work done at the end of its first run, and of its last) of each step."""
        costs, order, end = self.costs, self._order, 0.0
        if len(costs) == 1:
            return [(self.length, costs[0], self.work)]
        spans = [(0, 0.0, 0.0)] * len(costs)
        for position in range(self.length):
            number = order[position]
            end += costs[number]
            times, first, _ = spans[number]
            spans[number] = (times + 1, first if times else end, end)
        return spans


def fewest_left(parts: Parts) -> int:
    """Return the tokens until one of the sequences ends."""
    fewest = 1 << 30
    for _, seq in parts:
        left = seq.tracked.output - seq.tracked.sampled
        if left < fewest:
            fewest = left
    return fewest


def times_of(order: Sequence[int], steps: int) -> list[int]:
    """Return how often each of so many steps is in an order."""
    if steps == 1:
        return [len(order)]
    times = [0] * steps
    for number in order:
        times[number] = times[number] + 1
    return times


def _until_one_ends(order: tuple[int, ...], remaining: Sequence[int]) -> int:
    """Return after how many entries a step has run as often as it may."""
    if len(remaining) == 1:
        return min(len(order), remaining[0])
    left = list(remaining)
    for position, number in enumerate(order):
        runs = left[number] - 1
        left[number] = runs
        if not runs:
            return position + 1
    return len(order)
