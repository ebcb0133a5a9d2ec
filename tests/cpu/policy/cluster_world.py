"""A deployment in virtual time: slices that finish requests after a while, a pool that loads, and
checks of what a real controller relies on."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from c2cserve.core.actions import (
    Activate,
    ClusterAction,
    Deactivate,
    Dispatch,
    Evict,
    Forget,
    Load,
    Recall,
    Reject,
    Withdraw,
)
from c2cserve.core.events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Finished,
    FirstToken,
    ModelAdded,
    ModelFailed,
    ModelLoaded,
    ModelRemoving,
    ModelUsable,
    PoolState,
    Progressed,
    Recalled,
    SliceLost,
    SliceUp,
    StepTimes,
)
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy


@dataclass
class Live:
    request: Request
    slice_id: str | None = None
    ended: str = ""
    reject: Reject | None = None
    resumed: bool = False
    first_dispatch_s: float | None = None
    end_s: float = 0.0
    incarnation: int = 0
    begun: bool = False
    """It has a first token where it is."""
    recalls: int = 0


@dataclass
class UpSlice:
    slice: Slice
    active: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)


class ClusterTestWorld:
    """`service_s`: how long a request takes on a slice, drawn per dispatch around this mean."""

    def __init__(
        self,
        seed: int,
        slices: Iterable[Slice],
        settings: AdmissionSettings | None = None,
        budget_bytes: int = 1 << 40,
        service_s: float = 0.1,
        load_s: float = 0.5,
        fail_load: float = 0.0,
    ) -> None:
        self.random = Random(seed)
        self.policy = ClusterPolicy(settings)
        self.settings = settings or AdmissionSettings()
        self.budget = budget_bytes
        self.service_s, self.load_s, self.fail_load = service_s, load_s, fail_load
        self.now = 0.0
        self.specs: dict[str, ModelSpec] = {}
        self.pool: dict[str, str] = {}
        """Model -> loading, usable, loaded."""
        self.loads: dict[str, int] = {}
        self.removing: set[str] = set()
        self.forgotten: list[str] = []
        self.slices: dict[str, UpSlice] = {}
        self.jobs: dict[str, Live] = {}
        self.log: list[tuple[float, list[ClusterEvent], list[ClusterAction]]] = []
        self._heap: list[tuple[float, int, ClusterEvent, int]] = []
        self._order = count()
        self.at(0.0, PoolState(budget_bytes))
        for slice_ in slices:
            self.at(0.0, SliceUp(slice_))

    # ---- script ---------------------------------------------------------------------------------

    def at(self, when: float, event: ClusterEvent, incarnation: int = 0) -> None:
        heapq.heappush(self._heap, (when, next(self._order), event, incarnation))

    def add(self, spec: ModelSpec, when: float = 0.0) -> None:
        self.at(when, ModelAdded(spec))

    def arrive(self, request: Request) -> None:
        self.at(request.arrival_s, Arrived(request))

    def lose(self, when: float, slice_: Slice, back_s: float) -> None:
        self.at(when, SliceLost(slice_.id, ()))
        self.at(when + back_s, SliceUp(slice_))

    def run(self, until: float = 1e4, max_ticks: int = 200_000) -> None:
        for _ in range(max_ticks):
            wakeup = self.policy.wakeup
            times = [t for t in (self._heap[0][0] if self._heap else None, wakeup) if t is not None]
            if not times or min(times) > until:
                return
            self.now = max(self.now, min(times))
            events: list[ClusterEvent] = []
            while self._heap and self._heap[0][0] <= self.now:
                _, _, event, incarnation = heapq.heappop(self._heap)
                happens = self._happens(event, incarnation)
                if happens is not None:
                    events.append(happens)
            for event in events:
                self.policy.apply(event)
            actions = list(self.policy.decide(self.now))
            self.log.append((self.now, events, actions))
            for action in actions:
                self._act(action)
            self.check()
            if self.policy.done:
                return
        raise AssertionError("the world does not come to an end")

    # ---- what happens ---------------------------------------------------------------------------

    def _happens(self, event: ClusterEvent, incarnation: int) -> ClusterEvent | None:
        match event:
            case Arrived(request):
                self.jobs[request.id] = Live(request)
            case Cancelled(request_id):
                live = self.jobs.get(request_id)
                if live is None or live.ended:
                    return None
                live.ended = "cancelled"
            case FirstToken(request_id) | Progressed(request_id) | Finished(request_id):
                live = self.jobs[request_id]
                if live.ended or live.incarnation != incarnation:
                    return None
                if isinstance(event, Finished):
                    self._end(live, "finished")
                elif isinstance(event, FirstToken):
                    live.begun = True
                    live.request = replace(
                        live.request, sent=live.request.sent + 1,
                        prompt_len=live.request.prompt_len + 1,
                    )  # fmt: skip
            case Recalled(request):
                live = self.jobs[request.id]
                if live.ended or live.incarnation != incarnation or live.begun:
                    return None
                assert live.slice_id is not None
                self.slices[live.slice_id].running.discard(request.id)
                live.slice_id, live.resumed = None, True
                live.incarnation += 1
                return Recalled(live.request)
            case SliceUp(slice_):
                if slice_.id in self.slices:
                    return None
                self.slices[slice_.id] = UpSlice(slice_)
            case SliceLost(slice_id, _):
                if slice_id not in self.slices:
                    return None
                del self.slices[slice_id]
                displaced = []
                for live in self.jobs.values():
                    if live.slice_id == slice_id and not live.ended:
                        live.slice_id = None
                        live.resumed = True
                        live.incarnation += 1
                        displaced.append(live.request)
                return SliceLost(slice_id, tuple(displaced))
            case ModelAdded(spec):
                self.specs[spec.id] = spec
            case ModelUsable(name) | ModelLoaded(name) | ModelFailed(name):
                if self.loads.get(name) != incarnation:
                    return None
                if isinstance(event, ModelFailed):
                    del self.pool[name], self.loads[name]
                else:
                    self.pool[name] = "usable" if isinstance(event, ModelUsable) else "loaded"
            case ModelRemoving(name):
                if name in self.removing or name not in self.specs:
                    return None
                self.removing.add(name)
            case _:
                pass
        return event

    def _end(self, live: Live, how: str) -> None:
        assert not live.ended, f"{live.request.id} ends twice"
        live.ended = how
        live.end_s = self.now
        if live.slice_id in self.slices:
            self.slices[live.slice_id].running.discard(live.request.id)

    # ---- executor -------------------------------------------------------------------------------

    def _act(self, action: ClusterAction) -> None:
        match action:
            case Dispatch(request_id, slice_id):
                self._dispatch(self.jobs[request_id], slice_id)
            case Withdraw(request_id, slice_id):
                live = self.jobs[request_id]
                assert live.slice_id == slice_id
                self.slices[slice_id].running.discard(request_id)
            case Recall(request_id, slice_id, unstarted=True):
                live = self.jobs[request_id]
                assert live.slice_id == slice_id
                live.recalls += 1
                later = self.now + self.random.uniform(0.0, 0.02)
                self.at(later, Recalled(live.request), live.incarnation)
            case Reject(request_id):
                live = self.jobs[request_id]
                assert not (live.resumed and action.status == 429), "displaced, then refused"
                assert action.retry_after_s > 0
                assert action.reason
                live.reject = action
                self._end(live, "rejected")
            case Activate(model, slice_id):
                up = self.slices[slice_id]
                assert model not in up.active
                assert self.pool[model] != "loading"
                up.active.add(model)
            case Deactivate(model, slice_id):
                up = self.slices[slice_id]
                up.active.remove(model)
                busy = {self.jobs[r].request.model for r in up.running}
                assert model not in busy, "a model with requests leaves its slice"
            case Load(model):
                self._load(model)
            case Evict(model):
                self._unload(model)
                assert not self.specs[model].pinned
            case Forget(model):
                mine = [j for j in self.jobs.values() if j.request.model == model]
                assert all(live.ended for live in mine), "a model that is asked for is forgotten"
                self._unload(model)
                self.removing.remove(model)
                del self.specs[model]
                self.forgotten.append(model)

    def _dispatch(self, live: Live, slice_id: str) -> None:
        assert not live.ended
        assert live.slice_id is None
        up, model = self.slices[slice_id], live.request.model
        assert model in up.active
        assert self.pool[model] in {"usable", "loaded"}
        live.slice_id = slice_id
        if live.first_dispatch_s is None:
            live.first_dispatch_s = self.now
        up.running.add(live.request.id)
        live.incarnation += 1
        live.begun = False
        self._serve(live, slice_id, model)

    def _serve(self, live: Live, slice_id: str, model: str) -> None:
        took = self.random.expovariate(1 / self.service_s)
        self.at(self.now + took / 2, FirstToken(live.request.id, took / 2), live.incarnation)
        if live.resumed:
            part = took * self.random.uniform(0.5, 1.0)
            self.at(self.now + part, Progressed(live.request.id, part), live.incarnation)
        self.at(self.now + took, Finished(live.request.id, 1), live.incarnation)
        self.at(self.now + took, StepTimes(slice_id, model, took / 20, took / 200))

    def _load(self, model: str) -> None:
        assert model not in self.pool
        self.pool[model] = "loading"
        assert self.used_bytes() <= self.budget, "the pool is over its budget"
        number = self.loads[model] = next(self._order)
        took = self.random.uniform(0.5, 1.5) * self.load_s
        if self.random.random() < self.fail_load:
            self.at(self.now + took, ModelFailed(model, "bad file"), number)
            return
        self.at(self.now + took / 4, ModelUsable(model), number)
        self.at(self.now + took, ModelLoaded(model, 1, took), number)

    def _unload(self, model: str) -> None:
        assert not any(model in up.active for up in self.slices.values())
        mine = [live for live in self.jobs.values() if live.request.model == model]
        assert all(live.ended or live.slice_id is None for live in mine), (
            "a model in use is dropped"
        )
        self.pool.pop(model, None)
        self.loads.pop(model, None)

    def used_bytes(self) -> int:
        return sum(self.specs[model].weight_bytes for model in self.pool)

    # ---- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        waiting, begun = Counter[str](), set[str]()
        for live in self.jobs.values():
            if not live.ended and live.slice_id is None and not live.resumed:
                waiting[live.request.group] += 1
            elif live.request.group:
                begun.add(live.request.group)
        # A request of many choices is let in as a whole, and refused no more once it has begun.
        for group in begun:
            del waiting[group]
        largest = max((count for group, count in waiting.items() if group), default=1)
        assert waiting.total() - largest < self.settings.max_waiting
        for up in self.slices.values():
            assert len(up.active) <= up.slice.max_active
            # A tenant gets its share of a slice at once, also of one that is full.
            tenants = {self.jobs[one].request.tenant for one in up.running}
            assert len(up.running) <= 2 * up.slice.max_batch * (2 if len(tenants) > 1 else 1)
