"""Work stealing: an idle slice takes requests that would be late where they wait. Ours.

A request has *begun* on its slice when it has memory there. The controller is not told of that, so
it asks the slice (`actions.Recall`), which keeps what has begun. A request is recalled at most
`_RECALLS_MAX` times, and asked for once on each slice, so it cannot go back and forth.
"""

from collections.abc import Callable, Iterator

from c2cserve.core.actions import Recall
from c2cserve.core.request import Request
from c2cserve.policy.cluster.quantify import OVERESTIMATE
from c2cserve.policy.cluster.slice_load import PlacedRequest, SliceLoad

_RECALLS_MAX = 2

MayTake = Callable[[SliceLoad, str], bool]
"""Whether a slice may get requests of a model now."""


class Stealing:
    def __init__(
        self, slices: dict[str, SliceLoad], idle: dict[str, SliceLoad],
        starting: dict[str, SliceLoad],
    ) -> None:  # fmt: skip
        """`idle`: slices without requests. `starting`: those with requests that have no first
        token. In any order."""
        self._slices, self._idle, self._starting = slices, idle, starting
        self._asked: dict[str, str] = {}
        """Request that its slice was asked for -> the slice that shall take it; empty: its slice
        has kept it."""
        self._back: list[tuple[Request, str]] = []
        """The same of requests that have come back."""
        self._recalls: dict[str, int] = {}
        """Requests -> how many times they were asked for."""
        self.wakeup: float | None = None
        """When the next request that waits beside an idle slice becomes late."""

    def left(self, request: Request, *, back: bool) -> None:
        """Note that the request left its slice. `back`: because it was asked for."""
        target = self._asked.pop(request.id, "")
        if back and target:
            self._back.append((request, target))

    def begun(self, request_id: str) -> None:
        """Note that the request has tokens of the slice that it is on."""
        if request_id in self._asked:
            self._asked[request_id] = ""

    def ended(self, request_id: str) -> None:
        if self._recalls:
            self._recalls.pop(request_id, None)
            self._asked.pop(request_id, None)

    def placed(self) -> list[tuple[SliceLoad, Request]]:
        """Return requests that have come back, and the slice that each was recalled for."""
        if not self._back:
            return []
        back, self._back = self._back, []
        return [
            (self._slices[slice_id], request) for request, slice_id in back
            if slice_id in self._slices
        ]  # fmt: skip

    def uneven(self) -> tuple[list[SliceLoad], list[SliceLoad]] | None:
        """Return slices on which requests wait behind others, and idle ones. None: one kind is
        missing, so that nothing can be recalled."""
        self.wakeup = None
        if not self._idle:
            return None
        sources = [load for load in self._starting.values() if load.requests > 1]
        if not sources:
            return None
        asked = self._asked.values()
        idle = [load for name, load in self._idle.items() if name not in asked]
        return (sources, idle) if idle else None

    def recalls(
        self, sources: list[SliceLoad], idle: list[SliceLoad], now: float, may_take: MayTake
    ) -> list[Recall]:
        """Ask for requests. For each idle slice these are half of the requests of the slice with
        most late ones, or fewer if fewer are late. The most urgent go first."""
        actions: list[Recall] = []
        late = {load.slice.id: self._late(load, now) for load in sources}
        if not any(late.values()):
            return []
        for target in sorted(idle, key=lambda one: one.slice.id):
            wanted = [
                (sum(may_take(target, job.request.model) for job in late[load.slice.id]), load)
                for load in sources
            ]  # fmt: skip
            count, source = max(
                wanted, key=lambda one: (one[0], one[1].slice.id), default=(0, target)
            )
            if count:
                most = min(-(-source.requests // 2), target.slice.max_batch)
                actions += self._ask(source, target, late[source.slice.id], most, may_take)
        return actions

    def _ask(
        self,
        source: SliceLoad,
        target: SliceLoad,
        late: list[PlacedRequest],
        most: int,
        may_take: MayTake,
    ) -> Iterator[Recall]:
        taken = [job for job in late if may_take(target, job.request.model)][:most]
        for job in taken:
            late.remove(job)
            self._asked[job.request.id] = target.slice.id
            self._recalls[job.request.id] = self._recalls.get(job.request.id, 0) + 1
            yield Recall(job.request.id, source.slice.id)

    def _late(self, load: SliceLoad, now: float) -> list[PlacedRequest]:
        """Return requests without a first token on a busy slice that have others before them and
        are late. Some will be late only by what is believed of times."""
        waiting = sorted(
            (job.due_s, job.request.id, instance.times.prefill_s(job.request.prompt_len), job)
            for instance in load.busy() for job in instance.pending.values()
        )  # fmt: skip
        late: list[PlacedRequest] = []
        round_s = load.round_s()
        before_s = 0.0
        for due_s, request_id, prefill_s, job in waiting:
            first_s = OVERESTIMATE * (before_s + prefill_s + round_s)
            missed = now >= due_s
            misses = before_s > 0.0 and now + first_s > due_s and first_s < float("inf")
            before_s += prefill_s
            if request_id in self._asked or self._recalls.get(request_id, 0) >= _RECALLS_MAX:
                continue
            if missed or misses or self._lacks_place(load, job):
                late.append(job)
            elif self.wakeup is None or due_s < self.wakeup:
                self.wakeup = due_s
        return late

    @staticmethod
    def _lacks_place(load: SliceLoad, job: PlacedRequest) -> bool:
        """Whether other requests of its model fill the largest batch of the slice."""
        jobs = load.active[job.request.model].jobs.values()
        return sum(one.first_s is not None for one in jobs) >= load.slice.max_batch
