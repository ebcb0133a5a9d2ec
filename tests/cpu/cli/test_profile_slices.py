"""Neighbours of a slice that is timed are at work from before it begins until after it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from c2cserve.profiling.concurrent_slices import while_busy


@dataclass
class World:
    """Time passes with every look at an event."""

    now: float = 0.0


@dataclass
class FakeEvent:
    world: World
    at: float

    def query(self) -> bool:
        self.world.now += 0.01
        return self.world.now >= self.at


@dataclass
class FakeSlice:
    """Replays one after another, each for `takes`."""

    world: World
    takes: float
    spans: list[tuple[float, float]] = field(default_factory=list)

    def replay(self, graph: object) -> FakeEvent:
        begin = max(self.world.now, self.spans[-1][1] if self.spans else 0.0)
        self.spans.append((begin, begin + self.takes))
        return FakeEvent(self.world, begin + self.takes)

    @property
    def idle(self) -> float:
        """Between its replays."""
        return sum(after[0] - before[1] for before, after in pairwise(self.spans))


def time_one(
    world: World, slices: Sequence[FakeSlice], *, takes: float, enqueue: float = 0.0
) -> tuple[bool, float, float]:
    """Whether neighbours were busy, and when the work began and ended."""
    span = [0.0, 0.0]

    def work() -> Any:
        span[0] = world.now
        world.now += enqueue
        span[1] = span[0] + takes
        return FakeEvent(world, span[1])

    crowd: Any = [(one, object()) for one in slices]
    return while_busy(crowd, work), span[0], span[1]


@pytest.mark.parametrize("takes", [0.5, 5.0, 500.0])
@pytest.mark.parametrize("neighbours", [[1.0], [1.0, 3.0, 0.7]])
def test_neighbours_never_pause(takes: float, neighbours: list[float]) -> None:
    world = World()
    slices = [FakeSlice(world, each) for each in neighbours]
    busy, begin, end = time_one(world, slices, takes=takes)
    assert busy
    for one in slices:
        assert one.idle == 0
        assert one.spans[0][1] <= begin, "was at work before"
        assert one.spans[-1][1] > end, "and after"
        longest = max(neighbours)
        assert one.spans[-1][1] < end + 3 * longest + 1, "but not for long: the next one waits"


def test_a_host_that_is_too_slow_is_noticed() -> None:
    world = World()
    busy, *_ = time_one(world, [FakeSlice(world, 1.0)], takes=50.0, enqueue=10.0)
    assert not busy
    busy, *_ = time_one(world, [FakeSlice(world, 1.0), FakeSlice(world, 0.001)], takes=5.0)
    assert not busy
