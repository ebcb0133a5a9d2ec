"""The slow loop: admit, load, place, switch, keep; and after a fault, place again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from c2cserve.core.actions import (
    Activate,
    ClusterAction,
    Deactivate,
    Dispatch,
    Evict,
    Forget,
    Load,
    Reject,
    Withdraw,
)
from c2cserve.core.events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Draining,
    Finished,
    FirstToken,
    ModelAdded,
    ModelFailed,
    ModelLoaded,
    ModelRemoving,
    ModelUsable,
    PoolState,
    SliceLost,
    SliceUp,
    StepTimes,
)
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.admission import AdmissionSettings, Throughput, refusal
from c2cserve.policy.placement import SliceLoad, place

_RETRY_LOAD_S = 5.0
_RECHECK_S = 0.25
_AGING_S = 1.0
"""A step of priority is worth so many seconds of waiting: high priority goes first, and nothing
waits forever behind it."""


@dataclass(slots=True)
class _Model:
    spec: ModelSpec
    in_pool: bool = False
    """Loading or loaded: its memory is taken."""
    usable: bool = False
    removing: bool = False
    waiting: dict[str, Request] = field(default_factory=dict[str, Request])
    running: int = 0
    last_used_s: float = float("-inf")
    failed_s: float | None = None
    error: str = ""

    @property
    def in_use(self) -> bool:
        return bool(self.waiting) or self.running > 0


class ClusterPolicy:
    """`runtime.ports.Policy[ClusterEvent, ClusterAction]`."""

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self._settings = settings or AdmissionSettings()
        self._budget_bytes = 0
        self._models: dict[str, _Model] = {}
        self._slices: dict[str, SliceLoad] = {}
        self._where: dict[str, tuple[str, str]] = {}
        """Dispatched request -> model, slice."""
        self._actions: list[ClusterAction] = []
        self._fresh_failures: list[str] = []
        self._throughput = Throughput()
        self._draining = False
        self._no_slice_since_s: float | None = None

    @property
    def done(self) -> bool:
        return self._draining and not self._where and not any(self._queue())

    @property
    def wakeup(self) -> float | None:
        return self._wakeup_s

    _wakeup_s: float | None = None

    def _queue(self) -> Iterator[Request]:
        for model in self._models.values():
            yield from model.waiting.values()

    # ---- events ---------------------------------------------------------------------------------

    def apply(self, event: ClusterEvent) -> None:
        match event:
            case Arrived(request):
                self._arrived(request)
            case Cancelled(request_id):
                self._cancelled(request_id)
            case Finished(request_id):
                self._throughput.finished()
                self._left(request_id)
            case SliceUp(slice_):
                self._slices[slice_.id] = SliceLoad(slice_)
            case SliceLost(slice_id, displaced):
                self._slice_lost(slice_id, displaced)
            case StepTimes(slice_id, model, decode_step_s):
                if slice_id in self._slices:
                    self._slices[slice_id].step_s[model] = decode_step_s
            case PoolState(budget_bytes):
                self._budget_bytes = budget_bytes
            case Draining():
                self._draining = True
            case FirstToken():
                pass
            case _:
                self._apply_model(event)

    def _apply_model(self, event: ClusterEvent) -> None:
        match event:
            case ModelAdded(spec):
                self._models[spec.id] = _Model(spec)
            case ModelUsable(name):
                self._models[name].usable = True
            case ModelLoaded(name):
                self._models[name].failed_s = None
            case ModelFailed(name, reason):
                model = self._models[name]
                model.in_pool = model.usable = False
                model.error = reason
                self._fresh_failures.append(name)
                for load in self._slices.values():
                    load.active.pop(name, None)
            case ModelRemoving(name):
                self._models[name].removing = True
            case _:
                pass

    def _arrived(self, request: Request) -> None:
        model = self._models.get(request.model)
        if self._draining:
            self._reject(request, 503, "the server is shutting down", 5.0)
        elif model is None or model.removing:
            self._reject(request, 404, f"the model {request.model!r} does not exist", 1.0)
        elif model.spec.weight_bytes > self._budget_bytes:
            reason = (
                f"{request.model} takes {model.spec.weight_bytes} bytes of host memory and the "
                f"pool's budget is {self._budget_bytes}"
            )
            self._reject(request, 503, reason, 60.0)
        elif sum(1 for _ in self._queue()) >= self._settings.max_waiting:
            ahead = self._settings.max_waiting
            reason = f"{ahead} requests are waiting already"
            self._reject(request, 429, reason, max(1.0, self._throughput.wait_s(ahead)))
        else:
            model.waiting[request.id] = request

    def _reject(self, request: Request, status: int, reason: str, retry_after_s: float) -> None:
        self._actions.append(Reject(request.id, status, reason, retry_after_s))

    def _cancelled(self, request_id: str) -> None:
        for model in self._models.values():
            if model.waiting.pop(request_id, None) is not None:
                return
        if request_id in self._where:
            self._actions.append(Withdraw(request_id, self._where[request_id][1]))
            self._left(request_id)

    def _left(self, request_id: str) -> None:
        place_ = self._where.pop(request_id, None)
        if place_ is None:
            return
        name, slice_id = place_
        self._models[name].running -= 1
        load = self._slices.get(slice_id)
        if load is not None and name in load.active:
            load.active[name].discard(request_id)

    def _slice_lost(self, slice_id: str, displaced: Sequence[Request]) -> None:
        for request in displaced:
            self._left(request.id)
        self._slices.pop(slice_id, None)
        for request in displaced:
            model = self._models[request.model]
            # In front of what has not started: those clients have seen tokens already.
            model.waiting = {request.id: request, **model.waiting}

    # ---- decisions ------------------------------------------------------------------------------

    def decide(self, now: float) -> Sequence[ClusterAction]:
        saturated = bool(self._slices) and any(
            m.usable and m.waiting for m in self._models.values()
        )
        self._throughput.look(now, saturated=saturated)
        self._note_failures(now)
        self._refuse(now)
        self._load(now)
        self._dispatch(now)
        self._forget()
        self._wakeup_s = now + _RECHECK_S if any(self._queue()) else None
        actions, self._actions = self._actions, []
        return actions

    def _note_failures(self, now: float) -> None:
        for name in self._fresh_failures:
            model = self._models[name]
            model.failed_s = now
            for request in model.waiting.values():
                reason = f"{name} can not be loaded: {model.error}"
                self._reject(request, 500, reason, _RETRY_LOAD_S)
            model.waiting.clear()
        self._fresh_failures.clear()

    def _refuse(self, now: float) -> None:
        if self._slices:
            self._no_slice_since_s = None
        elif self._no_slice_since_s is None:
            self._no_slice_since_s = now
        down_s = 0.0 if self._no_slice_since_s is None else now - self._no_slice_since_s
        stuck = down_s > self._settings.no_slice_grace_s
        for ahead, request in enumerate(self._by_urgency()):
            if stuck:
                del self._models[request.model].waiting[request.id]
                self._reject(request, 503, f"no slice is up since {down_s:.0f} s", 5.0)
                continue
            why = refusal(request, ahead, self._throughput, self._settings, now)
            if why is not None:
                del self._models[request.model].waiting[request.id]
                self._reject(request, 429, *why)

    def _by_urgency(self) -> list[Request]:
        """Resumed requests first, then by due time, a step of priority being worth `_AGING_S`."""

        def key(request: Request) -> tuple[bool, float, str]:
            due = request.first_token_due_s - _AGING_S * request.priority
            return (not request.sent, due, request.id)

        return sorted(self._queue(), key=key)

    def _load(self, now: float) -> None:
        """Load what is asked for, evicting what is not used; and while there is room, load what is
        not asked for either: host memory is home."""
        for request in self._by_urgency():
            model = self._models[request.model]
            if not model.in_pool and self._may_load(model, now):
                self._make_room(model)
                self._start_load(model)
        idle = [m for m in self._models.values() if not m.in_pool and self._may_load(m, now)]
        idle.sort(key=lambda m: (not m.spec.pinned, -m.spec.priority, m.spec.id))
        for model in idle:
            if not model.removing and model.failed_s is None:
                self._start_load(model)

    def _may_load(self, model: _Model, now: float) -> bool:
        return model.failed_s is None or now - model.failed_s >= _RETRY_LOAD_S

    def _used_bytes(self) -> int:
        return sum(m.spec.weight_bytes for m in self._models.values() if m.in_pool)

    def _start_load(self, model: _Model) -> None:
        if self._used_bytes() + model.spec.weight_bytes <= self._budget_bytes:
            model.in_pool = True
            self._actions.append(Load(model.spec.id))

    def _make_room(self, wanted: _Model) -> None:
        """Evict the least recently used models that nobody uses and nobody pinned, if that is
        enough; else nothing."""
        lacking = self._used_bytes() + wanted.spec.weight_bytes - self._budget_bytes
        victims: list[_Model] = []
        unused = [m for m in self._models.values() if m.usable and not m.in_use]
        for model in sorted(unused, key=self._value):
            if lacking <= 0:
                break
            if not model.spec.pinned:
                victims.append(model)
                lacking -= model.spec.weight_bytes
        if lacking > 0:
            return
        for model in victims:
            self._drop(model)
            self._actions.append(Evict(model.spec.id))

    def _drop(self, model: _Model) -> None:
        """Take it from every slice and out of the pool's books."""
        name = model.spec.id
        for slice_id, load in self._slices.items():
            if load.active.pop(name, None) is not None:
                self._actions.append(Deactivate(name, slice_id))
        model.in_pool = model.usable = False

    def _value(self, model: _Model) -> tuple[float, float, str]:
        """What it costs to let the model go, lowest first."""
        return (
            float(model.spec.priority), model.last_used_s + model.spec.keep_warm_s, model.spec.id,
        )  # fmt: skip

    def _dispatch(self, now: float) -> None:
        full: set[str] = set()
        values = {name: self._value(m)[:2] for name, m in self._models.items()}
        for request in self._by_urgency():
            name = request.model
            model = self._models[name]
            if not model.usable or name in full:
                continue
            found = place(name, request.slo.tpot_s, self._slices.values(), values)
            if found is None:
                full.add(name)
                continue
            load = self._slices[found.slice_id]
            if found.deactivate is not None:
                del load.active[found.deactivate]
                self._actions.append(Deactivate(found.deactivate, found.slice_id))
            if found.activate:
                load.active[name] = set()
                self._actions.append(Activate(name, found.slice_id))
            load.active[name].add(request.id)
            del model.waiting[request.id]
            self._where[request.id] = (name, found.slice_id)
            model.running += 1
            model.last_used_s = now
            self._actions.append(Dispatch(request.id, found.slice_id))

    def _forget(self) -> None:
        for name in [n for n, m in self._models.items() if m.removing and not m.in_use]:
            self._drop(self._models.pop(name))
            self._actions.append(Forget(name))
