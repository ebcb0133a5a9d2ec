"""Models of which every request fails on a slice: kept away from it, and tried again later. Ours.

    given up --> no requests --back-off--> one request at a time --works--> as any model
                     ^                             |
                     `---- fails: twice as long ---'

A slice on which nothing works any more, of all that was tried, gets a new process.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from c2cserve.core import events as ev
from c2cserve.core.backoff import back_off_s
from c2cserve.core.model import name_of
from c2cserve.policy.cluster.slice_load import SliceLoad

_BACK_OFF_FIRST_S = 1.0
_BACK_OFF_MOST_S = 60.0
_REPLACE_AFTER = 2
"""Models given up on a slice in a row, or one model as often, with no other that worked between."""

_Key = tuple[str, str]
"""Slice, model."""


@dataclass(slots=True, eq=False)
class _Mark:
    reason: str
    retry_s: float | None = None
    """None: as of the next decision."""
    active: bool = True
    """Its instance is still active on the slice."""


class Failing:
    def __init__(
        self, slices: Mapping[str, SliceLoad], deactivate: Callable[[SliceLoad, str], bool]
    ) -> None:
        self._slices = slices
        self._deactivate = deactivate
        self._marks: dict[_Key, _Mark] = {}
        self._failures: Counter[_Key] = Counter()
        """Failures in a row; of a slice that was lost meanwhile, too."""
        self._given_up: Counter[str] = Counter()
        """Models given up on each slice, since something worked there."""

    def __bool__(self) -> bool:
        return bool(self._marks)

    def failed(self, event: ev.InstanceFailed) -> bool:
        """Whether the slice needs a new process."""
        slice_id, key = event.slice_id, (event.slice_id, event.model)
        self._marks[key] = _Mark(event.reason)
        self._given_up[slice_id] = 0 if event.others_work else self._given_up[slice_id] + 1
        return self._given_up[slice_id] >= _REPLACE_AFTER

    def works(self, model: str, slice_id: str) -> bool:
        """Note that the model works on the slice. Return whether it was given up there."""
        if not self._failures:
            return False
        self._given_up.pop(slice_id, None)
        self._failures.pop((slice_id, model), None)
        return self._marks.pop((slice_id, model), None) is not None

    def slice_lost(self, slice_id: str) -> None:
        """Forget the slice's failures: in its next process, each model may be tried at once."""
        self._given_up.pop(slice_id, None)
        for key in [key for key in self._marks if key[0] == slice_id]:
            del self._marks[key]

    def forget(self, model: str) -> None:
        for key in [key for key in self._failures if key[1] == model]:
            self._marks.pop(key, None)
            del self._failures[key]

    def refresh(self, now: float) -> bool:
        """Begin back-offs, and take models from slices that they have left. True: a model may be
        tried again that could not be before."""
        again = False
        for key, mark in self._marks.items():
            load = self._slices.get(key[0])
            instance = None if load is None else load.active.get(key[1])
            if mark.active and (load is None or instance is None or not instance.jobs):
                mark.active = False
                if load is not None:
                    self._deactivate(load, key[1])
            if mark.retry_s is None:
                failures = self._failures[key]
                self._failures[key] += 1
                mark.retry_s = now + back_off_s(failures, _BACK_OFF_FIRST_S, _BACK_OFF_MOST_S)
            again |= mark.retry_s <= now
        return again

    def open(self, load: SliceLoad, model: str, now: float) -> bool:
        """Whether a request of the model may go there: after the back-off, one at a time."""
        mark = self._marks.get((load.slice.id, model))
        if mark is None:
            return True
        instance = load.active.get(model)
        idle = instance is None or not instance.jobs
        return idle and not mark.active and mark.retry_s is not None and now >= mark.retry_s

    def refused(self, now: float, waiting: Iterable[str]) -> Iterator[tuple[str, str, float]]:
        """Yield those of the models that back off on every slice, with the reason and the seconds
        left."""
        for model in waiting:
            marks = [self._marks.get((one, model)) for one in self._slices]
            times = [
                mark.retry_s for mark in marks if mark is not None and mark.retry_s is not None
            ]
            if times and len(times) == len(marks) and min(times) > now:
                reason = next(mark.reason for mark in marks if mark is not None)
                yield model, f"{name_of(model)} fails on every slice: {reason}", min(times) - now
