"""How long steps of a lane occupy the GPU, by events in its stream.

    stream   [begin | copies, kernels ... | end][begin | ... | end]      idle      [begin | ...

A step's first event comes after the step before it, also if it was launched long before. Between
both events of a step the GPU may wait for kernels that the host launches one by one. That time is
the step's: nothing else of the lane can run then.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from c2cserve.engine.step_costs import StepKind, zeros


class TimedEvent(Protocol):
    """A point in a stream whose time is known once it is over: a `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Self) -> float:
        """Return milliseconds from this event to a later one. Both are over."""
        ...


EventT = TypeVar("EventT", bound=TimedEvent)


@dataclass(frozen=True, slots=True)
class _Span(Generic[EventT]):
    kind: StepKind
    begin: EventT
    end: EventT


class EventTimer(Generic[EventT]):
    """The `engine.step_costs.StepTimer` of a lane, used with the lane's stream as the current one.

    Events are used again once they are read, so steps create none. Not thread-safe.
    """

    def __init__(self, make: Callable[[], EventT]) -> None:
        """`make` returns a new event that measures time."""
        self._make = make
        self._spare: list[EventT] = []
        self._begun: tuple[StepKind, EventT] | None = None
        self._spans: deque[_Span[EventT]] = deque()
        self._seconds = zeros()

    def begin(self, kind: StepKind) -> None:
        if self._begun is not None:  # that one failed
            self._spare.append(self._begun[1])
        self._begun = kind, self._recorded()

    def end(self) -> None:
        assert self._begun is not None, "a step ends that has not begun"
        kind, begin = self._begun
        self._begun = None
        self._spans.append(_Span(kind, begin, self._recorded()))
        self.read()

    def read(self) -> Mapping[StepKind, float]:
        while self._spans and self._spans[0].end.query():
            span = self._spans.popleft()
            self._seconds[span.kind] += span.begin.elapsed_time(span.end) / 1e3
            self._spare += (span.begin, span.end)
        return self._seconds

    def _recorded(self) -> EventT:
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        return event
