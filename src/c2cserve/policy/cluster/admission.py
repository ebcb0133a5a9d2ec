"""Which requests are refused, and when to ask again (ours).

A burst waits, an overload is refused. When requests that can still be in time have waited without
a break for `burst_s`, more is asked than can be done. Then a newcomer whose first token would come
late is refused on arrival, and so is what waits and is late. Else a late request does no harm,
because requests that can be in time go before it (`policy.cluster.queue`). It waits for a quiet
moment, until its patience ends.

Choices of one request are refused together, and none of them once one was sent to a slice: then
they wait for their turns. Nor is a tenant refused that has less than its share.

What delays a first token beside the queue is not foreseen but learned (`InTimeShare`): the more
first tokens were late, the shorter the queue.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from c2cserve.core.actions import Backlog, Reject
from c2cserve.core.request import Request
from c2cserve.policy.cluster.fairness import FairShares
from c2cserve.policy.cluster.feedback import InTimeShare, Pace, Throughput
from c2cserve.policy.cluster.placement import worth_a_try
from c2cserve.policy.cluster.pool.residency import ModelBook
from c2cserve.policy.cluster.queue import WaitingQueue
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad
from c2cserve.policy.cluster.starts import Starts

BURST_S = 0.25
CALM_S = 2.0
"""An overload is over when no newcomer has had to wait for so long. Refusals make queues end early:
without this, each end would let in all that is asked for a burst's time."""
_RECHECK_S = 0.25
"""How often all waiting requests are looked at."""
_NO_BACKLOG = Backlog()
_HOPELESS_CHECK_S = 0.05
"""How often those on slices are, in an overload. What becomes late between two looks is served."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    max_waiting: int = 1024
    """Requests queued at the controller; one more is refused with 429."""
    patience: float = 20.0
    """A request is refused when it has waited, or is sure to wait, so many times its TTFT target.
    Its client has given up by then. 0: never."""
    no_slice_grace_s: float = 30.0
    """How long requests wait while no slice is up (one is being restarted), before 503."""
    foresee: bool = True
    """Refuse as soon as the expected wait is too long; else only once a request waited so long."""
    burst_s: float = BURST_S
    """An overload begins when requests that can be in time have waited for so long without a break.
    In it nothing waits for longer than its TTFT target. 0: any queue is. inf: none is."""

    @property
    def entrance_burst_s(self) -> float:
        """`burst_s` of the entrance, which refuses nothing either if patience has no end."""
        return self.burst_s if self.patience > 0.0 else inf


class Standing:
    """Tells a queue that stands from a burst that passes."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._since_s: float | None = None
        self._pressed_s = -inf
        self.is_long = False
        """Something has waited without a break for longer than a burst. It stays so while newcomers
        have to wait, and `CALM_S` more."""

    def note(self, *, waiting: bool, now: float) -> bool:
        """Whether something waits now; returns `is_long`."""
        if waiting:
            self._since_s = now if self._since_s is None else self._since_s
            self.is_long = self.is_long or now - self._since_s >= self._burst_s
        else:
            self._since_s = None
            self.is_long = self.is_long and now - self._pressed_s < CALM_S
        return self.is_long

    def press(self, now: float) -> None:
        """Note that a newcomer had to wait behind what waits already."""
        if self.is_long:
            self._pressed_s = now


def refusal(
    request: Request, ahead: int, throughput: Throughput, patience: float, now: float,
    *, foresee: bool = True,
) -> tuple[str, float] | None:  # fmt: skip
    """Return why a waiting request must be refused, and when to try again; None if it may wait on
    for `patience` times its TTFT target."""
    waited_s = now - request.arrival_s
    expected_s = waited_s + throughput.wait_s(ahead) * foresee
    if expected_s <= patience * request.slo.ttft_s:
        return None
    reason = (
        f"the first token is due within {request.slo.ttft_s:g} s; after waiting {waited_s:.1f} s "
        f"with {ahead} requests ahead it would take {expected_s:.1f} s"
    )
    return reason, max(1.0, throughput.wait_s(ahead))


class Admission:
    """Looks at requests that could not be placed, and tells which of them to refuse."""

    def __init__(
        self, settings: AdmissionSettings, queue: WaitingQueue, models: dict[str, ModelBook],
        slices: dict[str, SliceLoad], shares: FairShares,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._shares = shares
        self._queue = queue
        self._models = models
        self._slices = slices
        self.throughput = Throughput()
        self._standing = Standing(settings.burst_s)
        """The queue of requests that can be in time: they wait for places, so more is asked than
        can be done."""
        self.share = InTimeShare()
        self._late: list[Request] = []
        """Those that have become late since this was looked at."""
        self._pace = Pace()
        self._begun: dict[str, tuple[Request, float, float]] = {}
        """Requests with a first token: when they were sent to their slices, and when that came."""
        self._ended: list[tuple[Request, float, float, int]] = []
        """The same of those that have finished, and their lengths: no clock is read yet."""
        self._sent: dict[str, tuple[Request, float, str, bool]] = {}
        """Requests without a first token, when they were sent, and to which slices. Whether nothing
        was foreseen of it: another choice had begun, or it had waited for the pool."""
        self._starts = Starts()
        self._no_slice_since_s: float | None = None
        self.recheck_s = self._hopeless_check_s = 0.0
        self._notified = _NO_BACKLOG

    @property
    def wakeup(self) -> float | None:
        return self.recheck_s if self._queue or self.overload else None

    @property
    def overload(self) -> bool:
        """Whether more is asked than can be done."""
        return self._standing.is_long

    def sent(self, request: Request, slice_id: str, now: float) -> bool:
        """Note that a waiting request goes to a slice. Return whether it is never refused there."""
        pool = self._models[request.model].serves_since_s > request.arrival_s
        self._sent[request.id] = request, now, slice_id, pool or self._queue.begun(request.id)
        self._starts.changed(slice_id)
        return bool(request.group) or self.never_refused(request)

    def left(self, request_id: str) -> None:
        """Note that a request is on no slice any more."""
        if (sent := self._sent.pop(request_id, None)) is not None:
            self._starts.changed(sent[2])
        self._begun.pop(request_id, None)

    def finished(self, request_id: str, output_len: int) -> None:
        """Note that a request has ended by itself."""
        self.throughput.finished()
        if (begun := self._begun.pop(request_id, None)) is not None:
            self._ended.append((*begun, output_len))

    def first_token(self, request_id: str, after_s: float) -> None:
        """Learn from a first token, which came so long after its request arrived."""
        if (sent := self._sent.pop(request_id, None)) is None:
            return
        request, sent_s, slice_id, follows = sent
        load = self._slices.get(slice_id)
        counted_s = after_s - (0.0 if load is None else load.excused_s(request))
        counted_s = 0.0 if follows else counted_s
        late = counted_s > request.slo.ttft_s
        self._starts.started(slice_id, counted_s / request.slo.ttft_s, sent_s)
        self._begun[request_id] = request, sent_s, request.arrival_s + after_s
        if self.overload and not (request.sent or follows):
            self.share.note(late=late)

    def begin(self, now: float) -> None:
        """Note which waiting requests have become late, before new ones are looked at."""
        for request, sent_s, first_s, length in self._ended:
            tpot_s = (now - first_s) / max(1, length - 1)
            self._pace.note(late=tpot_s > request.slo.tpot_s, sent_s=sent_s, now=now)
        self._ended.clear()
        self._starts.refresh(self._unstarted, now)
        self._age(now)
        if not self._punctual():
            self._standing.note(waiting=False, now=now)

    def end(self, now: float) -> None:
        """Note what the machine can do, if requests wait that could run."""
        usable = any(self._usable(name) for name in self._queue.models())
        self.throughput.refresh(now, saturated=usable and bool(self._slices))

    def _age(self, now: float) -> None:
        if self._settings.patience > 0.0:  # else late requests would wait for ever
            self._late += self._queue.age(now)

    def overdue(self, now: float) -> Iterable[Reject]:
        """Refuse requests in an overload before any is placed. These are those that have become
        late since the last time, and those that are late on slices."""
        self._age(now)
        late, self._late = self._late, []
        overload = self.overload and self._settings.patience > 0.0
        return self._refused_late(late, now) if overload else ()

    def _refused_late(self, late: Sequence[Request], now: float) -> Iterator[Reject]:
        for one in self._hopeless(now):
            yield self._overdue(one, now)
        for one in late:
            usable = one.id in self._queue and self._usable(one.model)
            if usable and not self.never_refused(one):
                yield from self._together(one, self._overdue(one, now))

    def _together(self, request: Request, reject: Reject) -> Iterator[Reject]:
        """Refuse all choices of a request like this one."""
        for one in self._queue.together(request):
            yield replace(reject, request_id=one.id)

    def _overdue(self, request: Request, now: float) -> Reject:
        retry_s = max(1.0, self.throughput.wait_s(len(self._queue)))
        reason = (
            f"the first token is due within {request.slo.ttft_s:g} s, "
            f"{now - request.arrival_s:.1f} s have passed, and others are before it"
        )
        return Reject(request.id, 429, reason, retry_s, "overload")

    def refused(self, now: float, arrived: Sequence[Request]) -> Iterable[Reject]:
        """Refuse newcomers that could not be placed, and look at all others once in a while. Each
        one that is yielded must leave the queue before the next."""
        if self._queue and (arrived or now >= self.recheck_s):
            return self._refused(now, arrived)
        self._looked(now)
        self._standing.note(waiting=self._punctual(), now=now)
        return ()

    def _punctual(self) -> bool:
        """Return whether fresh requests of usable models wait that are not late."""
        return bool(self._queue and self._queue.punctual(self._usable, displaced=False))

    def _looked(self, now: float) -> bool:
        """Note that requests are looked at. Return whether it is time to look at all of them."""
        since_s = now if self._no_slice_since_s is None else self._no_slice_since_s
        self._no_slice_since_s = None if self._slices else since_s
        everybody = now >= self.recheck_s
        self.recheck_s = now + _RECHECK_S if everybody else self.recheck_s
        return everybody

    def _refused(self, now: float, arrived: Sequence[Request]) -> Iterator[Reject]:
        yield from self._too_many(arrived)
        everybody = self._looked(now)
        self._standing.note(waiting=self._punctual(), now=now)
        punctual = self._queue.punctual(self._usable)
        new = {request.id for request in arrived}
        if any(one in self._queue and self._queue.fresh(one) for one in new):
            self._standing.press(now)
        waiting = list(self._queue) if everybody else [r for r in arrived if r.id in self._queue]
        ahead = {} if everybody else punctual
        groups = {""}
        """Requests whose first choice was looked at: the others wait with it."""
        for request in waiting:
            if request.id not in self._queue:
                continue  # it was refused with another choice
            strict: float | None = None
            if self.overload and self._queue.late(request.id):
                strict = 1.0
            elif self.overload and request.id in new:
                # It was let in by the same rule where it was read. Until now it was prepared: that
                # work is lost with it, so its time does not count again.
                waited = (now - request.arrival_s) / request.slo.ttft_s
                strict = min(1.0, self.share.value + waited)
            reject = None
            if request.group not in groups or not request.group:
                before = turns_before(request.tenant, ahead)
                if request.group and not everybody:
                    before = max(0, before - len(self._queue.together(request)) + 1)
                reject = self._judge(request, before, now, strict)
                groups.add(request.group)
            if reject is not None:
                yield from self._together(request, reject)
            elif everybody and self._usable(request.model):
                ahead[request.tenant] = ahead.get(request.tenant, 0) + 1

    def _hopeless(self, now: float) -> list[Request]:
        """Return requests on slices that are late before their first token, or will be. Requests
        that can still be in time could have their places."""
        if now < self._hopeless_check_s:
            return []
        self._hopeless_check_s = now + _HOPELESS_CHECK_S
        hopeless = self._starts.hopeless
        return [job.request for load in self._slices.values() for job in hopeless(load, now)]

    def backlog(self) -> list[Backlog]:
        """Return what the server must know to refuse newcomers before anything is done for them;
        nothing if that has not changed."""
        backlog = _NO_BACKLOG
        refuses = self._settings.patience > 0.0
        if refuses and self.overload and self.throughput.per_s > 0.0:
            waiting = self._queue.punctual(self._usable)
            models = self._queue.models_in_time(self._usable)
            backlog = Backlog(
                self.throughput.per_s, tuple(sorted(waiting.items())), tuple(models),
                round(self.share.value, 2), self.places,
            )  # fmt: skip
        if backlog is self._notified or backlog == self._notified:
            return []
        self._notified = backlog
        return [backlog]

    def _too_many(self, arrived: Sequence[Request]) -> Iterator[Reject]:
        most = self._settings.max_waiting
        for request in arrived:
            if len(self._queue) <= most:
                return
            if request.id in self._queue:
                last, why = self._queue.excess(request), f"{most} requests are waiting already"
                waiting = len(self._queue) - len(self._queue.together(last))
                if waiting < most or self._queue.begun(last.id):
                    continue  # with all its choices it is only one too many
                retry_s = max(1.0, self.throughput.wait_s(most))
                yield from self._together(last, Reject(last.id, 429, why, retry_s, "queue_full"))

    def _judge(
        self, request: Request, ahead: int, now: float, strict: float | None
    ) -> Reject | None:
        """`strict`: the patience with it in an overload."""
        down_s = 0.0 if self._no_slice_since_s is None else now - self._no_slice_since_s
        if down_s > self._settings.no_slice_grace_s:
            return Reject(request.id, 503, f"no slice has been up for {down_s:.0f} s", 5.0)
        if self.never_refused(request):
            return None
        # A model that is loading waits for its weights, not for those ahead.
        usable, patience = self._usable(request.model), self._settings.patience
        overload = strict is not None and usable
        if strict is not None and usable:
            patience = min(strict, patience)
        foresee = self._settings.foresee
        why = refusal(request, ahead * usable, self.throughput, patience, now, foresee=foresee)
        limit = "overload" if overload else "patience"
        return None if why is None else Reject(request.id, 429, *why, limit)

    def may_be_late(self, request: Request) -> bool:
        """Whether it waits although it is late, so that it might as well be served."""
        late = self._queue.late(request.id) and self._settings.patience > 1.0
        return late or self.never_refused(request)

    def taking(self, loads: list[SliceLoad], request: Request) -> list[SliceLoad]:
        """Return the slices that start the requests they have soon enough to be sent another."""
        if not self._starts.distrusted or self._goes_anywhere(request):
            return loads
        ttft_s, starts = request.slo.ttft_s, self._starts
        return [one for one in loads if not starts.full(one.slice.id, one.unstarted, ttft_s)]

    def _unstarted(self, slice_id: str) -> int:
        """Return how many requests a slice has without a first token."""
        load = self._slices.get(slice_id)
        return 0 if load is None else load.unstarted

    def confirmed(
        self, placement: Placement | None, request: Request, now: float
    ) -> Placement | None:
        """Return the placement of a waiting request. In an overload, and while answers are slow, a
        busy CPU slice gets none on which it or others would be late. `placement` has looked at that
        for other slices. What is late already may stay so."""
        strict = self.overload or self._pace.slow(now)
        if placement is None or not strict or self._goes_anywhere(request):
            return placement
        load, late = self._slices[placement.slice_id], self.may_be_late(request)
        late = late or self._queue.late(request.id)
        if not load.is_cpu:
            return placement
        tried = worth_a_try(load, request, now, self._pace.share, late=late)
        return placement if tried else None

    def _goes_anywhere(self, request: Request) -> bool:
        return self._settings.patience <= 0.0 or self._queue.displaced(request.id)

    def never_refused(self, request: Request) -> bool:
        """Whether a waiting request is kept however late it is. A tenant with less than its share
        cannot be the reason for an overload."""
        kept = self._settings.patience <= 0.0 or self._queue.begun(request.id)
        if kept or self._shares.tenants <= 1:
            return kept
        return self._shares.within(request.tenant, self.places)

    @property
    def places(self) -> int:
        """Return how many requests the slices take."""
        return sum(load.most_requests for load in self._slices.values())

    def _usable(self, model: str) -> bool:
        return self._models[model].serving


def turns_before(tenant: str, waiting: Mapping[str, int]) -> int:
    """Return how many requests are served before the tenant's next one. These are all that wait, or
    fewer if it has few of them, because tenants take turns."""
    tenants = len(waiting) + (tenant not in waiting)
    return min(sum(waiting.values()), (waiting.get(tenant, 0) + 1) * tenants - 1)
