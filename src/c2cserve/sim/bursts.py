"""Rounds of decode steps as one event: their end is arithmetic as long as nothing intervenes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Burst:
    """`costs[i]`: work (seconds, when nobody shares the slice) of one round of step `i`; `counts`:
    rounds that each will have done at the end. Steps take turns, the first one first, so counts
    fall by one at most, once."""

    costs: list[float]
    counts: list[int]

    @classmethod
    def planned(cls, costs: Sequence[float], rounds: int, owed: Sequence[int]) -> "Burst":
        """`owed[i]`: rounds after which a sequence of step `i` finishes. The burst ends with the
        step in which the first one does."""
        least = min(owed)
        if least > rounds:
            return cls(list(costs), [rounds] * len(costs))
        last = owed.index(least)
        return cls(list(costs), [least - (index > last) for index in range(len(costs))])

    @property
    def round_work(self) -> float:
        return sum(self.costs)

    @property
    def work(self) -> float:
        return sum(cost * count for cost, count in zip(self.costs, self.counts, strict=True))

    def cut(self, done: float) -> bool:
        """Stop at the end of the step that is under way when `done` of the work is over. False:
        that is where it ends anyhow."""
        whole = int(done / self.round_work)
        rest = done - whole * self.round_work
        last = 0
        while last < len(self.costs) - 1 and rest >= self.costs[last]:
            rest -= self.costs[last]
            last += 1
        counts = [whole + (index <= last) for index in range(len(self.costs))]
        if sum(counts) >= sum(self.counts):
            return False
        self.counts = counts
        return True

    def end_of(self, index: int) -> float:
        """Work done when step `index` ends its last round."""
        return (self.counts[index] - 1) * self.round_work + sum(self.costs[: index + 1])
