"""Requests that may have killed their worker: found by bisection, on slices of their own. Ours.

    a worker dies --> its requests are suspects, and are placed like any others
    another worker dies with some of them --> these are isolated, half by half:

    half on an empty slice --each draws `PROGRESS_TOKENS` or ends--> cleared
                           --worker dies--> halves of the half --> ... --> one request
    one request that two workers had to itself when they died, of four in all --> 500

A worker that dies for an outside reason costs its requests a pause: they make progress when they
run next, and are cleared. With one poisonous request among n, at most 4 + log2(n) workers die. Two
die in company, one for each halving, one beside cleared requests, and two alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from c2cserve.core.request import Request
from c2cserve.policy.cluster.slice_load import SliceLoad

_ISOLATE_DEATHS = 2
_REFUSE_DEATHS = 4
"""Workers in a row that a request must have lost, without progress between,"""
_REFUSE_ALONE = 2
"""and those among them that had no other request, before it is held responsible."""
_EMPTY_S = 5.0
"""How long suspects wait for an empty slice before one is closed to other requests."""


@dataclass(slots=True)
class _Record:
    """Workers that died with the request, since it last made progress."""

    deaths: int = 0
    alone: int = 0
    last_slice: str = ""

    @property
    def responsible(self) -> bool:
        return self.deaths >= _REFUSE_DEATHS and self.alone >= _REFUSE_ALONE


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the requests of a slice that was lost."""

    placed: Sequence[Request]
    """They are placed like any others."""
    isolated: Sequence[Request]
    """They wait in `Suspects`."""
    refused: Sequence[tuple[Request, str]]
    """They killed their workers, and why that is certain."""


class Suspects:
    """The requests that are isolated wait here, in no queue."""

    def __init__(self, no_slice_grace_s: float) -> None:
        self._no_slice_grace_s = no_slice_grace_s
        self._records: dict[str, _Record] = {}
        self._groups: list[list[Request]] = []
        """Requests that wait for a trial together, the most suspicious first."""
        self._trials: dict[str, dict[str, None]] = {}
        """Slice -> its requests on trial that have made no progress yet. The slice is closed to
        other requests, also between two trials."""
        self._reserved = ""
        """A slice that is closed to other requests until it is empty."""
        self._excused: set[str] = set()
        """Slices whose process ends because the policy wants it to."""
        self._since_s: float | None = None
        """Since when requests wait while no trial is under way."""
        self.wakeup: float | None = None
        """When that has lasted too long."""

    @property
    def held(self) -> int:
        """Requests that wait here."""
        return sum(map(len, self._groups))

    @property
    def closing(self) -> bool:
        """Whether some slice takes no other requests now."""
        return bool(self._trials or self._reserved)

    def closed(self, slice_id: str) -> bool:
        """Whether the slice takes no other requests now."""
        return slice_id in self._trials or slice_id == self._reserved

    # ---- what happens to workers and requests ---------------------------------------------------

    def excuse(self, slice_id: str) -> None:
        """The slice's process is about to be ended by us: no request is to blame."""
        self._excused.add(slice_id)

    def slice_lost(self, slice_id: str, displaced: Sequence[Request]) -> Verdict:
        trial = self._trials.pop(slice_id, None)
        if slice_id == self._reserved:
            self._reserved = ""
        # Requests that were cleared are not charged with a death beside those on trial.
        charged = [one for one in displaced if trial is None or one.id in trial]
        if slice_id in self._excused:
            self._excused.remove(slice_id)
        else:
            for request in charged:
                record = self._records.setdefault(request.id, _Record())
                record.deaths += 1
                record.alone += len(displaced) == 1
                record.last_slice = slice_id
        isolated = [one for one in charged if trial is not None or self._isolates(one)]
        refused: list[tuple[Request, str]] = []
        if len(isolated) == 1 and self._records[isolated[0].id].responsible:
            refused = [(isolated[0], self._why(self._records.pop(isolated[0].id)))]
            isolated = []
        half = -(-len(isolated) // 2)
        self._groups[:0] = filter(None, (isolated[:half], isolated[half:]))
        apart = {one.id for one in (*isolated, *(one for one, _ in refused))}
        return Verdict([one for one in displaced if one.id not in apart], isolated, refused)

    def _isolates(self, request: Request) -> bool:
        record = self._records.get(request.id)
        return record is not None and record.deaths >= _ISOLATE_DEATHS

    @staticmethod
    def _why(record: _Record) -> str:
        return (
            f"{record.deaths} workers died while they ran this request, "
            f"{record.alone} of them while they ran no other"
        )

    def cleared(self, request_id: str) -> None:
        """Note that the request has made progress, or has ended."""
        if self._records or self._trials:
            self._records.pop(request_id, None)
            self.left(request_id)

    def left(self, request_id: str) -> None:
        """Note that the request is not on trial any more."""
        for trial in self._trials.values():
            trial.pop(request_id, None)

    def withdraw(self, request_id: str) -> Request | None:
        """Take a request that waits here away."""
        for group in self._groups:
            for request in group:
                if request.id == request_id:
                    group.remove(request)
                    return request
        return None

    # ---- trials ---------------------------------------------------------------------------------

    def due(
        self, slices: Iterable[SliceLoad], now: float
    ) -> Sequence[tuple[SliceLoad | None, Request]]:
        """Return requests whose trial begins now, and where; None: placed like any other."""
        if not self._groups and not self._trials:
            self.wakeup, self._since_s, self._reserved = None, None, ""
            return ()
        self._groups = [group for group in self._groups if group]
        loads = list(slices)
        begun: list[tuple[SliceLoad | None, Request]] = []
        while self._groups:
            load = self._free(loads)
            if load is None:
                break
            taken = self._take(load)
            self._trials[load.slice.id] = dict.fromkeys(one.id for one in taken)
            self._reserved = ""
            begun += [(load, one) for one in taken]
            loads.remove(load)
        begun += self._wait(loads, now)
        if not self._groups:
            self._reserved = ""
            for slice_id in [one for one, trial in self._trials.items() if not trial]:
                del self._trials[slice_id]
        return begun

    def _free(self, loads: Iterable[SliceLoad]) -> SliceLoad | None:
        """Return a slice for the first group: an empty one, or one on which the last trial has
        cleared all requests. It is not where the group's worker died last, if there is a choice."""
        record = self._records.get(self._groups[0][0].id)
        last = "" if record is None else record.last_slice
        free = [
            (load.requests > 0, load.slice.id == last, load.slice.id, load)
            for load in loads
            if not load.requests or self._trial_is_over(load)
        ]
        return min(free, key=lambda one: one[:3])[3] if free else None

    def _trial_is_over(self, load: SliceLoad) -> bool:
        over = load.slice.id in self._trials and not self._trials[load.slice.id]
        return over and load.requests < load.most_requests

    def _take(self, load: SliceLoad) -> list[Request]:
        """Take as much of the first group as the slice takes."""
        group = self._groups.pop(0)
        models = {one.spec.id for one in load.busy()}
        taken: list[Request] = []
        rest: list[Request] = []
        for request in group:
            room = load.requests + len(taken) < load.most_requests
            if room and len(models | {request.model}) <= load.slice.max_active:
                models.add(request.model)
                taken.append(request)
            else:
                rest.append(request)
        if rest and taken:
            self._groups.insert(0, rest)
        return taken or rest

    def _wait(
        self, loads: Sequence[SliceLoad], now: float
    ) -> Sequence[tuple[SliceLoad | None, Request]]:
        """Close a slice to other requests when the groups that are left have waited for an empty
        one for long. Let go of all of them when no slice has been up for too long."""
        self.wakeup = None
        if not self._groups or any(self._trials.values()):
            self._since_s = None
            return ()
        self._since_s = now if self._since_s is None else self._since_s
        if self._reserved:
            return ()
        due_s = self._since_s + (_EMPTY_S if loads else self._no_slice_grace_s)
        if now < due_s:
            self.wakeup = due_s
        elif loads:
            self._reserved = min(loads, key=lambda one: (one.requests, one.slice.id)).slice.id
        else:
            self._since_s = None
            let_go = [(None, one) for group in self._groups for one in group]
            self._groups.clear()
            return let_go
        return ()
