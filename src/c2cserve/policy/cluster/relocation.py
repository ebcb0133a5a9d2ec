"""Requests that move to a slice which is chosen for them: suspects, and those that are stolen.

It joins `policy.cluster.suspects` and `policy.cluster.stealing` to the books of `policy.cluster`.
All other requests go where `policy.cluster.placement` says.
"""

from collections.abc import Callable, Sequence

from c2cserve.core import events as ev
from c2cserve.core.actions import Recall
from c2cserve.core.request import Request
from c2cserve.policy.cluster.failing import Failing
from c2cserve.policy.cluster.pool.residency import ModelBook
from c2cserve.policy.cluster.queue import WaitingQueue
from c2cserve.policy.cluster.slice_load import SliceLoad
from c2cserve.policy.cluster.stealing import Stealing
from c2cserve.policy.cluster.suspects import Suspects

SendTo = Callable[[Request, SliceLoad, float], bool]
"""Takes a waiting request out of the queue to this slice. False: it does not fit there now."""


def earlier(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times, of which each may be none."""
    if one is None or (other is not None and other < one):
        return other
    return one


class Relocation:
    def __init__(
        self,
        suspects: Suspects,
        stealing: Stealing,
        models: dict[str, ModelBook],
        slices: dict[str, SliceLoad],
        queue: WaitingQueue,
        failing: Failing,
        send_to: SendTo,
        *,
        on: bool,
    ) -> None:
        """`on`: False for the baselines, which relocate nothing."""
        self._suspects = suspects
        self._models = models
        self._slices = slices
        self._queue = queue
        self._failing = failing
        self._send_to = send_to
        self._on = on
        self._stealing = stealing

    @property
    def held(self) -> bool:
        """Whether requests wait here. (They count as running, so their models stay.)"""
        return bool(self._suspects.held)

    @property
    def wakeup(self) -> float | None:
        return earlier(self._suspects.wakeup, self._stealing.wakeup)

    def closed(self, load: SliceLoad) -> bool:
        """Whether the slice is kept for suspects."""
        return self._suspects.closed(load.slice.id)

    def open(self, loads: list[SliceLoad]) -> list[SliceLoad]:
        """Return those of the slices that are not kept for suspects."""
        if not self._suspects.closing:
            return loads
        return [load for load in loads if not self.closed(load)]

    # ---- events ---------------------------------------------------------------------------------

    def tokens(self, event: ev.FirstToken | ev.Progressed) -> None:
        self._stealing.begun(event.request_id)
        if isinstance(event, ev.Progressed):
            self._suspects.cleared(event.request_id)

    def returned(self, event: ev.Recalled | ev.Returned) -> None:
        self._suspects.left(event.request.id)
        self._stealing.left(event.request, back=isinstance(event, ev.Recalled))

    def ended(self, request_id: str) -> bool:
        """Forget the request. Return whether it waited here."""
        self._suspects.cleared(request_id)
        self._stealing.ended(request_id)
        held = self._suspects.withdraw(request_id)
        if held is not None:
            self._models[held.model].running -= 1
        return held is not None

    def slice_lost(
        self, slice_id: str, displaced: Sequence[Request]
    ) -> tuple[Sequence[Request], Sequence[tuple[Request, str]]]:
        """Keep the requests that are to be isolated. Return those to be placed like any others,
        and those to be refused, with the reason."""
        for request in displaced:
            self._stealing.left(request, back=False)
        if not self._on or slice_id not in self._slices:
            # A fresh loop is told of requests that no worker's death has displaced.
            return displaced, ()
        verdict = self._suspects.slice_lost(slice_id, displaced)
        for request in verdict.isolated:
            self._models[request.model].running += 1
        return verdict.placed, verdict.refused

    def excuse(self, slice_id: str) -> None:
        """The slice's process is about to be ended by us."""
        self._suspects.excuse(slice_id)

    # ---- decisions ------------------------------------------------------------------------------

    def direct(self, now: float) -> bool:
        """Send requests to the slices that are chosen for them. Those that cannot go there stay in
        the queue like any others. True: others may have more room than before."""
        closing = self._suspects.closing
        due = self._suspects.due(self._slices.values(), now)
        for load, request in due:
            self._models[request.model].running -= 1
            self._queue.push(request, displaced=True)
            if load is None or not self._try(request, load, now):
                self._suspects.left(request.id)
        for load, request in self._stealing.placed():
            if request.id in self._queue and not self.closed(load):
                self._try(request, load, now)
        return bool(due) or closing

    def _try(self, request: Request, load: SliceLoad, now: float) -> bool:
        return self._may_take(load, request.model, now) and self._send_to(request, load, now)

    def _may_take(self, load: SliceLoad, model: str, now: float) -> bool:
        room = load.requests < load.most_requests
        return room and self._models[model].usable and self._failing.open(load, model, now)

    def recalls(self, now: float) -> Sequence[Recall]:
        """Return what idle slices steal from the others."""
        uneven = self._stealing.uneven() if self._on else None
        return () if uneven is None else self._recalls(*uneven, now)

    def _recalls(
        self, sources: list[SliceLoad], idle: list[SliceLoad], now: float
    ) -> Sequence[Recall]:
        def may_take(load: SliceLoad, model: str) -> bool:
            return not self.closed(load) and self._may_take(load, model, now)

        return self._stealing.recalls(sources, idle, now, may_take)
