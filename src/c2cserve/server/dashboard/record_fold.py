"""The state of a recorded server or simulation, line by line of the record."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec, ModelState
from c2cserve.runtime.replay import SIMULATED
from c2cserve.runtime.wire import untagged
from c2cserve.server.dashboard.slice_fold import SliceFold
from c2cserve.server.dashboard.state import DashboardState, ModelView, Playback, QueueView
from c2cserve.server.dashboard.timelines import Timelines
from c2cserve.server.dashboard.views import links_of, targets_of


@dataclass(slots=True)
class _Model:
    """One version of a model."""

    spec: ModelSpec
    state: ModelState = ModelState.COLD
    error: str = ""


class RecordFold:
    """Folds lines of a record, in the file's order, into the state."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.now_s = 0.0
        self._timelines = Timelines()
        self._clusters: set[str] = set()
        """Streams of the controller."""
        self._folds: dict[str, SliceFold] = {}
        """Stream of a worker -> its slice."""
        self._workers: dict[str, SliceFold] = {}
        """Slice -> its newest worker."""
        self._starts: Counter[str] = Counter()
        self._states: dict[str, str] = {}
        self._models: dict[str, _Model] = {}
        self._budget_bytes = 0
        self._draining = False
        self._simulated = False

    def add(self, line: dict[str, Any]) -> None:
        """Apply a line. Raises KeyError, TypeError, `runtime.wire.WireError` or
        `msgspec.ValidationError` for what is no line of a record."""
        stream = line["stream"]
        if "policy" in line:
            self._begin(stream, line["policy"], line["arguments"])
            return
        now, events, actions = line["now"], untagged(line["events"]), untagged(line["actions"])
        self.now_s = max(self.now_s, now)
        if stream in self._clusters:
            self._timelines.tick(now, events, actions)
            self._controller(events, actions)
        else:
            self._folds[stream].tick(now, events, actions)

    def _begin(self, stream: str, policy: str, arguments: dict[str, Any]) -> None:
        self._simulated |= policy.startswith(SIMULATED)
        if policy.endswith("cluster"):
            self._clusters.add(stream)
            self._timelines.begin_loop()
            return
        slice_ = msgspec.convert(arguments["slice"], Slice)
        self._folds[stream] = self._workers[slice_.id] = SliceFold(slice_, self._timelines)
        self._starts[slice_.id] += 1
        self._states.setdefault(slice_.id, "starting")

    def _controller(self, events: Sequence[object], actions: Sequence[object]) -> None:
        for event in events:
            match event:
                case ev.SliceUp(slice_):
                    self._states[slice_.id] = "up"
                    if slice_.id not in self._workers:  # its own stream is not in this file
                        self._workers[slice_.id] = SliceFold(slice_, self._timelines)
                case ev.SliceLost(slice_id):
                    self._states[slice_id] = "lost"
                case ev.PoolState(budget_bytes):
                    self._budget_bytes = budget_bytes
                case ev.Draining():
                    self._draining = True
                case ev.ModelAdded(spec):
                    known = self._models.get(spec.id)
                    self._models[spec.id] = known or _Model(spec)
                case ev.ModelUsable(model) | ev.ModelLoaded(model):
                    loaded = isinstance(event, ev.ModelLoaded)
                    self._move(model, ModelState.READY if loaded else ModelState.LOADING)
                case ev.ModelFailed(model, reason):
                    self._move(model, ModelState.FAILED, reason)
                case ev.ModelRemoving(model):
                    self._move(model, ModelState.DRAINING)
                case _:
                    pass
        for action in actions:
            match action:
                case act.Load(model):
                    self._move(model, ModelState.LOADING)
                case act.Evict(model):
                    self._move(model, ModelState.COLD)
                case act.Forget(model):
                    self._models.pop(model, None)
                case _:
                    pass

    def _move(self, model: str, state: ModelState, error: str = "") -> None:
        one = self._models.get(model)
        if one is not None:
            one.state, one.error = state, error

    # ---- to show it -----------------------------------------------------------------------------

    def state(self, playback: Playback | None = None, now_s: float | None = None) -> DashboardState:
        """Return the state at `now_s`, by default at the last line."""
        now = self.now_s if now_s is None else now_s
        timelines = self._timelines
        running, waiting = timelines.counts()
        slices = tuple(
            fold.view(now, self._states.get(name, "starting"), max(0, self._starts[name] - 1))
            for name, fold in self._workers.items()
        )
        known = {name: fold.slice for name, fold in self._workers.items()}
        pooled = (one for one in self._models.values() if one.state is ModelState.READY)
        newest = {one.spec.name: one for one in self._models.values()}
        return DashboardState(
            source="record", name=self._name, now_s=now, draining=self._draining,
            pool_used_bytes=sum(one.spec.weight_bytes for one in pooled),
            pool_budget_bytes=self._budget_bytes, slices=slices,
            links=links_of(known, slices, simulated=self._simulated),
            models=tuple(self._model(one, running, waiting, now) for one in newest.values()),
            queue=QueueView(
                running=running.total(), waiting=waiting.total(),
                oldest_waiting_s=timelines.oldest_waiting_s(now), tenants=(),
                refused=dict(timelines.refused), recent=timelines.refusals(),
            ),
            requests=timelines.views(), playback=playback,
        )  # fmt: skip

    def _model(
        self, one: _Model, running: Counter[str], waiting: Counter[str], now: float
    ) -> ModelView:
        spec, name = one.spec, one.spec.name
        folds = self._workers.values()
        views = [(fold.slice.id, fold) for fold in folds if self._states[fold.slice.id] == "up"]
        return ModelView(
            id=name, state=one.state.value, error=one.error, pinned=spec.pinned,
            weight_bytes=spec.weight_bytes,
            pool_bytes=spec.weight_bytes if one.state is ModelState.READY else 0,
            active_slices=tuple(id_ for id_, fold in views if spec.id in fold.specs),
            resident_slices=tuple(id_ for id_, fold in views if spec.id in fold.resident),
            running=running[name], waiting=waiting[name],
            **targets_of(self._timelines, name, now),  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
