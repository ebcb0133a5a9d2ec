"""The slow loop: admit, load, place, switch, keep; and after a fault, place again."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Generic

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.model import name_of
from c2cserve.core.policy import Policy
from c2cserve.core.request import Request
from c2cserve.policy.cluster.admission import Admission, AdmissionSettings
from c2cserve.policy.cluster.departures import Changes, Departures
from c2cserve.policy.cluster.failing import Failing
from c2cserve.policy.cluster.fairness import FairShares
from c2cserve.policy.cluster.instances import Instances
from c2cserve.policy.cluster.placement import active_if_full, awaited
from c2cserve.policy.cluster.pool import residency
from c2cserve.policy.cluster.pool.residency import ModelBook, PoolBooks
from c2cserve.policy.cluster.pool.turns import PoolTurns
from c2cserve.policy.cluster.queue import WaitingQueue
from c2cserve.policy.cluster.relocation import Relocation, earlier
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad
from c2cserve.policy.cluster.stealing import Stealing
from c2cserve.policy.cluster.strategies import ExtraT, Strategies, live_strategies
from c2cserve.policy.cluster.suspects import Suspects


class ClusterPolicy(Policy[ev.ClusterEvent, act.ClusterAction | ExtraT], Generic[ExtraT]):
    """The controller's policy. Without `strategies` it is what a server runs, and has no actions of
    the type `ExtraT`."""

    def __init__(
        self, settings: AdmissionSettings | None = None,
        strategies: Strategies[ExtraT] | None = None,
    ) -> None:  # fmt: skip
        settings, strategies = settings or AdmissionSettings(), strategies or live_strategies()
        self._placing, self._outputs = strategies.placing, strategies.outputs
        self._models: dict[str, ModelBook] = {}
        self._pool = PoolBooks()
        self._shares = shares = FairShares()
        self._queue = queue = WaitingQueue(shares)
        self._turns = PoolTurns(self._models, self._pool, queue)
        self._actions: list[act.ClusterAction | ExtraT] = []
        self._instances = Instances(strategies.instances, self._outputs, self._actions)
        self._slices, self._where = self._instances.slices, self._instances.where
        self._admission = Admission(settings, queue, self._models, self._slices, shares)
        self._failing = Failing(self._slices, self._instances.deactivate)
        stealing = Stealing(self._slices, self._instances.idle, self._instances.starting)
        self._relocation = Relocation(
            Suspects(settings.no_slice_grace_s), stealing, self._models, self._slices, self._queue,
            self._failing, self._send_to, on=strategies.placing.ours,
        )  # fmt: skip
        self._changes = Changes()
        self._departures = Departures(
            self._models, queue, shares, self._instances, self._admission, self._relocation,
            self._changes, self._actions,
        )  # fmt: skip
        self._arrived: list[Request] = []
        self._failed, self._removing = list[str](), list[str]()
        self._broken: set[str] = set()
        """Models whose last load failed."""
        self._draining = False

    @property
    def done(self) -> bool:
        busy = self._where or self._instances.recalled or self._queue or self._arrived
        return self._draining and not (busy or self._relocation.held)

    @property
    def wakeup(self) -> float | None:
        idle_s = 0.0 if self._changes.pool else self._instances.wakeup
        return earlier(earlier(idle_s, self._relocation.wakeup), self._admission.wakeup)

    # ---- events ---------------------------------------------------------------------------------

    def apply(self, event: ev.ClusterEvent) -> None:
        if isinstance(event, ev.Arrived):  # it, first tokens and ends are most of them
            self._arrived.append(event.request)
        elif isinstance(event, ev.FirstToken):
            self._progressed(event, event.ttft_s)
        elif isinstance(event, ev.Finished):
            self._finished(event)
        else:
            self._apply_rare(event)

    def _progressed(self, event: ev.FirstToken | ev.Progressed, after_s: float) -> None:
        self._admission.first_token(event.request_id, after_s)
        self._instances.first_token(event.request_id, after_s)
        self._relocation.tokens(event)
        self._departures.relieve(event.request_id)

    def _apply_rare(self, event: ev.ClusterEvent) -> None:
        match event:  # frequent ones first, as cases are tried one by one
            case ev.InstanceLoading() | ev.TokensSent() | ev.StepTimes():
                self._instances.apply(event)
            case ev.InstanceReady() | ev.KvResized() | ev.Profiled():
                self._instances.apply(event)
                self._changes.room = True
            case ev.Cancelled(request_id):
                if not self._departures.cancelled(request_id):
                    self._arrived = [r for r in self._arrived if r.id != request_id]
            case ev.Progressed():
                self._progressed(event, event.after_s)
            case ev.SliceUp(slice_):
                self._instances.slice_up(slice_)
                self._changes.room = True
            case ev.SliceLost(slice_id, displaced):
                self._slice_lost(slice_id, displaced)
            case ev.Draining():
                self._draining = True
            case ev.Recalled(request) | ev.Returned(request):
                self._relocation.returned(event)
                if self._departures.left(request.id) is not None:
                    self._wait(request, displaced=True)
                    self._changes.room = True
            case ev.InstanceFailed(slice_id, _, reason):
                if slice_id in self._slices and self._failing.failed(event):
                    self._relocation.excuse(slice_id)
                    self._actions.append(act.Replace(slice_id, reason))
            case ev.InstanceRecovered(slice_id, name):
                self._changes.room |= self._failing.works(name, slice_id)
            case _:
                self._apply_model(event)

    def _apply_model(self, event: ev.ClusterEvent) -> None:
        self._changes.pool = self._changes.room = True
        match event:
            case ev.PoolState(budget_bytes):
                self._pool.budget_bytes = budget_bytes
            case ev.ModelAdded(spec, replaces, in_pool):
                book = self._models[spec.id] = ModelBook(spec, replaces, in_pool)
                self._pool.added(book)
            case ev.ModelUsable(name) | ev.ModelWanted(name) | ev.ModelUsed(name):
                if name in self._models:
                    self._models[name].note(event)
                    self._pool.noted(self._models[name])
            case ev.ModelLoaded(name):
                self._models[name].arrived()
                self._broken.discard(name)
            case ev.ModelFailed(name, reason):
                self._models[name].error = reason
                self._failed.append(name)
            case ev.ModelRemoving(name) if not self._models[name].removing:
                self._models[name].removing = True
                self._removing.append(name)
            case _:
                pass

    def _wait(self, request: Request, *, displaced: bool = False) -> None:
        self._shares.entered(request, begun=displaced)
        self._queue.push(request, displaced=displaced)

    def _finished(self, event: ev.Finished) -> None:
        if not event.failed and event.request_id in self._where:
            self._changes.room |= self._failing.works(*self._where[event.request_id])
        if (model := self._departures.finished(event)) is not None:
            self._outputs.learn(model, event.output_len)

    def _slice_lost(self, slice_id: str, displaced: Sequence[Request]) -> None:
        self._failing.slice_lost(slice_id)
        displaced, refused = self._relocation.slice_lost(slice_id, displaced)
        for request, why in refused:
            self._departures.reject(request, 500, why, 1.0)
        for name in self._instances.slice_lost(slice_id, displaced):
            self._models[name].running -= 1
        for request in displaced:
            self._wait(request, displaced=True)
        self._changes.pool = self._changes.room = True

    # ---- decisions ------------------------------------------------------------------------------

    def decide(self, now: float) -> Sequence[act.ClusterAction | ExtraT]:
        self._changes.room |= self._instances.refresh(now)
        self._admission.begin(now)
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            self._admit(request)
        self._departures.refuse(self._admission.overdue(now))
        self._back_off(now)
        if self._failed or self._broken:
            self._fail(now)
        if self._changes.pool or now >= self._admission.recheck_s:
            self._load(now)
        self._changes.room |= self._relocation.direct(now)
        self._dispatch(now, arrived)
        self._dispatch_owed(now)
        self._departures.refuse(self._admission.refused(now, arrived))
        self._actions += self._admission.backlog()
        self._forget()
        self._actions += self._relocation.recalls(now)
        self._admission.end(now)
        actions = self._actions[:]
        self._actions.clear()
        return actions

    def _admit(self, request: Request) -> None:
        model = self._models.get(request.model)
        if self._draining:
            self._departures.reject(request, 503, "the server is shutting down", 5.0)
        elif model is None or model.removing:
            self._departures.reject(
                request, 404, f"the model {name_of(request.model)!r} does not exist", 1.0
            )
        else:
            self._changes.pool |= not model.in_pool
            model.asks.note(request.arrival_s)
            self._wait(request)

    def _fail(self, now: float) -> None:
        """End the requests of models that cannot be loaded, and delay the next try."""
        for model in (self._models[name] for name in self._failed):
            name = model.spec.id
            if model.in_pool:  # else another slice could not use it either
                model.failed(now)
            running = [r for r, (m, _) in self._where.items() if m == name]
            self._departures.refuse(act.Reject(r, 503, model.unloadable, 5.0) for r in running)
            self._leave_pool(model)
            self._broken.add(name)
        self._failed.clear()
        for name in sorted(self._broken & self._queue.models()):
            model = self._models[name]
            if model.retry_s is not None and not model.in_pool and now < model.retry_s:
                for request in self._queue.of(name):
                    self._departures.reject(request, 503, model.unloadable, model.retry_s - now)

    def _back_off(self, now: float) -> None:
        """Keep models that fail away from slices, and end what can only wait for them."""
        if not self._failing:
            return
        self._changes.room |= self._failing.refresh(now)
        for name, why, retry_s in list(self._failing.refused(now, self._queue.models())):
            for request in self._queue.of(name):
                self._departures.reject(request, 503, why, retry_s)

    def _load(self, now: float) -> None:
        """Load what is asked for, evicting what is not used; then load what there is room for."""
        self._changes.pool, budget_bytes = False, self._pool.budget_bytes
        self._pool.refresh(now)
        self._changes.room |= self._turns.begin(now)
        if budget_bytes is None or not self._pool.outside:
            return
        models, outside = self._models.values(), self._pool.outside
        # Also of requests that waited already: a model may have been pinned since.
        absent = [outside[name] for name in sorted(self._queue.models()) if name in outside]
        if absent:
            for name, why in residency.impossible(absent, models, budget_bytes):
                for request in self._queue.of(name):
                    self._departures.reject(request, 503, why, 60.0)
        wanted = self._pool.wanted()
        if absent or wanted:
            free_bytes = budget_bytes - self._pool.used_bytes
            for model, victims in self._turns.loads(wanted, free_bytes, now):
                for victim in victims:
                    self._leave_pool(victim)
                    self._actions.append(act.Evict(victim.spec.id))
                self._start_load(model, now)
            self._turns.end(budget_bytes - self._pool.used_bytes, now)
        free_bytes = 0 if self._turns.owed else budget_bytes - self._pool.used_bytes
        if not self._draining and free_bytes >= self._pool.least_bytes:
            for model in residency.unasked_loads(outside.values(), models, free_bytes):
                self._start_load(model, now)

    def _start_load(self, model: ModelBook, now: float) -> None:
        self._pool.entered(model, now)
        self._actions.append(act.Load(model.spec.id))

    def _leave_pool(self, model: ModelBook) -> None:
        """Take it from every slice and out of the pool's books."""
        name = model.spec.id
        for load in self._slices.values():
            self._instances.deactivate(load, name)
        self._pool.left(model)

    def _dispatch(self, now: float, arrived: Sequence[Request]) -> None:
        """Place what can be placed, most urgent first."""
        relieved, self._changes.relieved = self._changes.relieved, {}
        changed, self._changes.room = self._changes.room, False
        if not self._queue:
            return
        anywhere, untried = changed or not self._placing.ours, self._queue.uncovered
        if self._placing.polls:
            changed = now >= self._admission.recheck_s
            relieved.clear()
            untried.clear()
        if not (changed or relieved or arrived or untried):
            return
        names, fresh = set(self._queue.models()), {one.id for one in arrived}
        if not changed and not relieved:  # the first of other models could not be placed before
            names = {one.model for one in arrived} | (untried & names)
        if not names:
            return
        loads, only = self._open()
        heads = [
            (turn, name) for name in (names if only is None else names & only)
            if (turn := self._queue.turn(name)) and self._models[name].usable
        ]  # fmt: skip
        heapify(heads)
        while heads and loads:
            before, name = heappop(heads)
            turn = self._queue.turn(name)
            if turn is not None and turn > before:  # its tenant got a place meanwhile
                heappush(heads, (turn, name))
                continue
            if turn is None or (only is not None and name not in only):
                continue
            request = self._queue.request(turn)
            choice = loads
            if not (anywhere or name in untried or request.id in fresh):
                choice = [load for load in loads if load.slice.id in relieved]
            if self._failing:
                choice = [load for load in choice if self._failing.open(load, name, now)]
            placement = self._place(request, choice, now)
            if placement is not None:
                self._send(request, placement, now)
                if (turn := self._queue.turn(name)) is not None:
                    heappush(heads, (turn, name))
                if heads:
                    loads, only = self._open()
        untried.clear()

    def _dispatch_owed(self, now: float) -> None:
        """Place requests of tenants that have less than their share of slices full of others."""
        fair = self._placing.ours and 1 < self._shares.tenants <= self._admission.places
        for name in sorted(self._queue.models()) if fair else ():
            heads = self._queue.heads(name) if self._models[name].serving else []
            while sum(self._send_owed(request, now) for request in heads):
                heads = self._queue.heads(name)

    def _send_owed(self, request: Request, now: float) -> bool:
        """Send the request at once if its tenant has less than its share of a slice."""
        closed, all_ = self._relocation.closed, self._slices.values()
        loads = [load for load in all_ if load.owes(request.tenant) and not closed(load)]
        if self._failing:
            loads = [load for load in loads if self._failing.open(load, request.model, now)]
        spec = self._models[request.model].spec
        placement = self._placing.place_owed(request, spec, loads, self._value, now)
        if placement is not None:
            self._send(request, placement, now)
        return placement is not None

    def _open(self) -> tuple[list[SliceLoad], set[str] | None]:
        """Return the slices that take more requests, and the only models they take (None: any)."""
        loads = [one for one in self._slices.values() if one.requests < one.most_requests]
        loads = self._relocation.open(loads)
        return loads, active_if_full(loads) if self._placing.ours else None

    def _place(self, request: Request, loads: list[SliceLoad], now: float) -> Placement | None:
        book = self._models[request.model]
        if book.closing and not self._queue.begun(request.id):
            return None
        loads = self._admission.taking(loads, request)
        spec, runs, late = book.spec, book.running > 0, self._admission.may_be_late(request)
        scarce = self._placing.ours and self._admission.overload
        if scarce and not self._admission.never_refused(request):
            all_, mean = self._queue.count(spec.id), self._outputs.mean(spec.id)
            loads = [x for x in loads if not awaited(request, x, self._models, all_, mean, now)]
        found = self._placing.place(
            request, spec, loads, self._value, now, late=late, runs=runs,
            owed_bytes=self._queue.owed_bytes(spec.id),
        )  # fmt: skip
        self._queue.shut_out(spec.id, 0 if found or runs else spec.weight_bytes)
        return self._admission.confirmed(found, request, now)

    def _value(self, name: str) -> tuple[float, ...]:
        """Return what it costs to let a model without requests leave a slice; lowest first."""
        return self._queue.count(name) > 0, *self._models[name].value

    def _send_to(self, request: Request, load: SliceLoad, now: float) -> bool:
        """Send the request to this slice, if it can go there now."""
        if (placement := self._place(request, [load], now)) is not None:
            self._send(request, placement, now)
        return placement is not None

    def _send(self, request: Request, placement: Placement, now: float) -> None:
        model = self._models[request.model]
        kept = self._admission.sent(request, placement.slice_id, now)
        self._queue.remove(request.id)
        self._shares.dispatched(request, self._outputs.mean(model.spec.id))
        self._queue.follow(request)
        self._instances.send(request, model.spec, placement, now, kept=kept)
        model.running += 1
        model.slice_id = placement.slice_id
        model.used(now)

    def _forget(self) -> None:
        for name in self._removing[:]:
            if not self._models[name].running and not self._queue.count(name):
                self._removing.remove(name)
                self._broken.discard(name)
                self._failing.forget(name)
                self._leave_pool(self._models.pop(name))
                self._pool.forget(name)
                self._actions.append(act.Forget(name))
                self._changes.pool = True
