"""What was going on when: the judge asks it what a request may have met."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

LOOK_S = 1.0
"""How often the server's state is looked at."""
_OUTAGE_S = 20.0
"""After two workers were lost in a row, until the next one is up at the latest."""
_REFILLED_S = 25.0
"""After there is room again, until workers and loads that failed for want of it were tried again:
the time between tries grows with each."""
_SLACK_S = 0.5
"""Of moments that are seen by looking every so often, or by an answer that was under way."""


@dataclass(slots=True)
class _Span:
    begin_s: float
    end_s: float = math.inf

    def meets(self, begin_s: float, end_s: float) -> bool:
        return self.begin_s - _SLACK_S <= end_s and begin_s <= self.end_s + _SLACK_S


class Moments:
    def __init__(self) -> None:
        self._absent: dict[str, list[_Span]] = defaultdict(list)
        self._disturbed: list[tuple[float, str]] = []
        self._preempted: list[float] = []
        self._no_slice: list[_Span] = []
        self._full: list[_Span] = []
        self._slices: set[str] = set()
        self.draining_s = math.inf
        """When the server was told to end."""

    # ---- what is noted --------------------------------------------------------------------------

    def removing(self, model: str) -> None:
        self._absent[model].append(_Span(time.monotonic()))

    def added(self, model: str) -> None:
        self._absent[model][-1].end_s = time.monotonic()

    def disturbed(self, slice_id: str) -> None:
        """A slice's worker is killed or stopped now."""
        self._disturbed.append((time.monotonic(), slice_id))

    def preempted(self) -> None:
        """Requests were preempted since the last look."""
        self._preempted.append(time.monotonic())

    def looked(self, up: int, slices: Collection[str]) -> None:
        """So many of the slices are up now."""
        now = time.monotonic()
        self._slices = set(slices)
        if not up and (not self._no_slice or self._no_slice[-1].end_s < math.inf):
            self._no_slice.append(_Span(now))
        elif up and self._no_slice and self._no_slice[-1].end_s == math.inf:
            self._no_slice[-1].end_s = now

    def filling(self) -> None:
        """The pool's filesystem is being filled."""
        self._full.append(_Span(time.monotonic()))

    def freed(self) -> None:
        self._full[-1].end_s = time.monotonic()

    # ---- what is asked --------------------------------------------------------------------------

    def absent(self, model: str, begin_s: float, end_s: float) -> bool:
        """Whether the model was out of the catalogue, or on its way in or out, meanwhile."""
        return any(span.meets(begin_s, end_s) for span in self._absent.get(model, ()))

    def comes_and_goes(self, model: str) -> bool:
        """Whether the model is one that is added and removed; what it counts goes with it."""
        return model in self._absent

    def disturbances(self, begin_s: float, end_s: float) -> int:
        """How often a worker was killed or stopped meanwhile; shortly before counts as well."""
        return sum(begin_s - 15.0 <= at_s <= end_s for at_s, _ in self._disturbed)

    def calm(self, begin_s: float, end_s: float) -> bool:
        """Whether nothing was computed twice: no request preempted, no worker killed or stopped."""
        seen_s = end_s + LOOK_S + _SLACK_S
        preempted = any(begin_s <= at_s <= seen_s for at_s in self._preempted)
        return not preempted and not self.disturbances(begin_s, end_s)

    def all_back_off(self, begin_s: float, end_s: float) -> bool:
        """Whether every slice may have lost two workers in a row meanwhile: the next ones are
        started with a delay, and the server says so instead of waiting."""
        recent = [name for at_s, name in self._disturbed if begin_s - _OUTAGE_S <= at_s <= end_s]
        lost = Counter(recent)
        return bool(self._slices) and all(lost[name] >= 2 for name in self._slices)

    def outage(self, begin_s: float, end_s: float) -> bool:
        """Whether every slice may have been without a worker that can be started."""
        return self.all_back_off(begin_s, end_s) or self.full(begin_s, end_s)

    def full(self, begin_s: float, end_s: float) -> bool:
        """Whether the pool's filesystem was full meanwhile, or so shortly before that workers and
        models which could not be started or loaded then may still be missing."""
        return any(span.meets(begin_s - _REFILLED_S, end_s) for span in self._full)

    def no_slice(self, begin_s: float, end_s: float, for_s: float) -> bool:
        """Whether no slice was up for so long, at some time meanwhile."""
        return any(
            span.meets(begin_s, end_s) and min(end_s, span.end_s) - span.begin_s >= for_s - 1.0
            for span in self._no_slice
        )
