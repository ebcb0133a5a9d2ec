"""Decode steps that follow each other as one event. Its end is arithmetic unless another event
intervenes."""

from bisect import bisect_right
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
        ends: list[float] = []
        done = 0.0
        if len(costs) == 1:
            each = costs[0]
            for _ in range(self.length):
                done += each
                ends.append(done)
        else:
            for position in range(self.length):
                done += costs[order[position]]
                ends.append(done)
        self._ends = ends
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
        return times_of(order, len(self.costs))

    def spans(self) -> list[tuple[int, float, float]]:
        """Return (runs, work done at the end of its first run, and of its last) of each step."""
        ends = self._ends
        if len(self.costs) == 1:
            return [(self.length, ends[0], self.work)]
        order, steps = self._order, len(self.costs)
        times, firsts, lasts = [0] * steps, [0] * steps, [0] * steps
        for position in range(self.length):
            number = order[position]
            if not times[number]:
                firsts[number] = position
            lasts[number] = position
            times[number] += 1
        return [
            (times[number], ends[firsts[number]], ends[lasts[number]]) if times[number]
            else (0, 0.0, 0.0) for number in range(steps)
        ]  # fmt: skip


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
        times[number] += 1
    return times


def _until_one_ends(order: tuple[int, ...], remaining: Sequence[int]) -> int:
    """Return after how many entries a step has run as often as it may."""
    if len(remaining) == 1:
        return min(len(order), remaining[0])
    left = list(remaining)
    for position, number in enumerate(order):
        left[number] -= 1
        if not left[number]:
            return position + 1
    return len(order)
