"""Decode steps that follow each other as one event. Its end is arithmetic unless another event
intervenes."""

from c2cserve.core.step import SeqStep
from c2cserve.sim.world.checks import SeqState

Parts = list[tuple[SeqStep, SeqState]]
"""The sequences of a step."""


class Burst:
    """A burst of steps that repeat.

    `costs[i]` is the work of step `i` in seconds on an unshared slice, the same each time. `order`
    lists which step runs when. After `remaining[i]` runs a sequence of step `i` ends, and the burst
    with it."""

    def __init__(self, costs: list[float], order: tuple[int, ...], remaining: list[int]) -> None:
        self._order = order
        self.costs = costs
        length, work = _until_one_ends(costs, order, remaining)
        self.length = length
        """How many entries run."""
        self.work = work
        """The work of these."""

    def _over(self, done: float) -> tuple[int, float]:
        """Return how many entries have ended when `done` of the work is over. Return also the work
        at the end of the one that is under way.

        (Sums are made again where they are asked for. To keep them all takes longer.)"""
        costs, order, end = self.costs, self._order, 0.0
        if len(costs) == 1:
            each = costs[0]
            for position in range(self.length):
                end += each
                if end > done:
                    return position, end
        else:
            for position in range(self.length):
                end += costs[order[position]]
                if end > done:
                    return position, end
        return self.length, end

    def cut(self, done: float) -> bool:
        """End the burst with the step that is under way when `done` of the work is over.

        Return whether this shortens it."""
        over, work = self._over(done)
        if over + 1 >= self.length:
            return False
        self.length, self.work = over + 1, work
        return True

    def runs(self, done: float) -> list[int]:
        """Return how often each step has run when `done` of the work is over."""
        over, _ = self._over(done)
        return times_of(self._order[:over], len(self.costs))

    def spans(self) -> list[tuple[int, float, float]]:
        """Return (runs, work done at the end of its first run, and of its last) of each step."""
        costs, order, end = self.costs, self._order, 0.0
        if len(costs) == 1:
            return [(self.length, costs[0], self.work)]
        runs = [0] * len(costs)
        first, last = [0.0] * len(costs), [0.0] * len(costs)
        for position in range(self.length):
            number = order[position]
            end += costs[number]
            times = runs[number]
            runs[number] = times + 1
            last[number] = end
            if not times:
                first[number] = end
        return [(runs[number], first[number], last[number]) for number in range(len(costs))]


def fewest_left(parts: Parts) -> int:
    """Return the tokens until one of the sequences ends."""
    fewest = 1 << 30
    for _, seq in parts:
        left = seq.tracked.output - seq.tracked.sampled
        if left < fewest:
            fewest = left
    return fewest


def times_of(order: tuple[int, ...], steps: int) -> list[int]:
    """Return how often each of so many steps is in an order."""
    if steps == 1:
        return [len(order)]
    times = [0] * steps
    for number in order:
        times[number] = times[number] + 1
    return times


def _until_one_ends(
    costs: list[float], order: tuple[int, ...], remaining: list[int]
) -> tuple[int, float]:
    """Return after how many entries a step has run as often as it may, and the work of these."""
    done = 0.0
    if len(costs) == 1:
        length, each = min(len(order), remaining[0]), costs[0]
        for _ in range(length):
            done += each
        return length, done
    left = remaining[:]
    for position in range(len(order)):
        number = order[position]
        done += costs[number]
        runs = left[number] - 1
        left[number] = runs
        if not runs:
            return position + 1, done
    return len(order), done
