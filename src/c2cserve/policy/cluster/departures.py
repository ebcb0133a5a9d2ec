"""Requests that leave: refused, cancelled, finished, or taken from their slices."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.request import Request
from c2cserve.policy.cluster.admission import Admission
from c2cserve.policy.cluster.fairness import FairShares
from c2cserve.policy.cluster.instances import Instances
from c2cserve.policy.cluster.pool.residency import ModelBook
from c2cserve.policy.cluster.queue import WaitingQueue
from c2cserve.policy.cluster.relocation import Relocation
from c2cserve.policy.cluster.strategies import ExtraT


@dataclass(slots=True, eq=False)
class Changes:
    """What may be possible now that was not before."""

    pool: bool = True
    """Loads."""
    room: bool = True
    """Dispatches to any slice."""
    relieved: dict[str, None] = field(default_factory=dict[str, None])
    """Slices that requests have left, or computed the prompt of one, in that order: only they have
    more room."""


class Departures(Generic[ExtraT]):
    """Every book forgets a request that leaves. What its going makes possible is noted in
    `changes`, and the actions that it takes are appended to `actions`."""

    def __init__(
        self, models: dict[str, ModelBook], queue: WaitingQueue, shares: FairShares,
        instances: Instances[ExtraT], admission: Admission, relocation: Relocation,
        changes: Changes, actions: list[act.ClusterAction | ExtraT],
    ) -> None:  # fmt: skip
        self._models = models
        self._queue = queue
        self._shares = shares
        self._instances = instances
        self._admission = admission
        self._relocation = relocation
        self._changes = changes
        self._actions = actions

    def left(self, request_id: str) -> str | None:
        """Note that a request is on no slice, nor on its way from one. Return its model."""
        self.relieve(request_id)
        self._admission.left(request_id)
        name = self._instances.left(request_id)
        if name is not None:
            self._models[name].running -= 1
            self._changes.pool |= not self._models[name].running
        return name

    def relieve(self, request_id: str) -> None:
        """Note that the slice of a request has more room: it leaves, or its prompt is computed."""
        where = self._instances.where.get(request_id)
        if where is not None:
            self._changes.relieved[where[1]] = None

    def finished(self, event: ev.Finished) -> str | None:
        """Note that a request has ended by itself. Return its model if it was on a slice."""
        self._admission.finished(event.request_id, event.output_len)
        self._relocation.ended(event.request_id)
        name = self.left(event.request_id)
        self._shares.ended(event.request_id, event.output_len)
        return name

    def cancelled(self, request_id: str) -> bool:
        """Forget a request. Return whether it waited, or was on a slice."""
        self._instances.undispatch(request_id)
        if self._leave_queue(request_id):
            self._changes.pool = True
            return True
        return self.left(request_id) is not None

    def reject(self, request: Request, status: int, reason: str, retry_after_s: float) -> None:
        """Refuse a request that is on no slice, or on a lost one."""
        self._leave_queue(request.id)
        self._actions.append(act.Reject(request.id, status, reason, retry_after_s))

    def refuse(self, rejects: Iterable[act.Reject]) -> None:
        """Refuse requests that wait, or that are on slices."""
        for reject in rejects:
            if self._instances.undispatch(reject.request_id):
                self.left(reject.request_id)
            self._leave_queue(reject.request_id)
            self._actions.append(reject)

    def _leave_queue(self, request_id: str) -> bool:
        """Forget a request that is refused or cancelled. Return whether it waited."""
        held = self._relocation.ended(request_id)
        self._shares.ended(request_id)
        return self._queue.remove(request_id) is not None or held
