"""The state of a running server: the controller's ticks as they happen, and what workers count.

It needs no `--record`: the controller's loop hands each tick to `TickTap` as it does to a record.
Slices tick in their own processes, so what they do is read from the snapshot.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelStatus, name_of
from c2cserve.core.request import Timing
from c2cserve.runtime.gateway import Gateway, SliceStatus, Snapshot
from c2cserve.server.dashboard.rates import WINDOW_S
from c2cserve.server.dashboard.state import (
    DashboardState,
    ModelView,
    QueueView,
    RefusalView,
    RequestView,
    SliceView,
)
from c2cserve.server.dashboard.timelines import Timelines
from c2cserve.server.dashboard.views import link_of, links_of, targets_of

log = logging.getLogger(__name__)

_REFUSED = ("rejected_", "refused_")
"""Counters of the snapshot that begin like this count refused requests."""


@dataclass(slots=True)
class ControllerView:
    """What the controller's ticks tell beside the requests' timelines."""

    slices: dict[str, Slice] = field(default_factory=dict[str, Slice])
    loading: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    """Slice -> versions of models that it loads as a whole."""

    def tick(self, events: Sequence[object], actions: Sequence[object]) -> None:
        for event in events:
            match event:
                case ev.SliceUp(one):
                    self.slices[one.id] = one
                    self.loading[one.id] = {}
                case ev.SliceLost(slice_id):
                    self.loading[slice_id] = {}
                case ev.InstanceReady(model, slice_id):
                    self.loading.get(slice_id, {}).pop(model, None)
                case _:
                    pass
        for action in actions:
            match action:
                case act.Activate(model, slice_id, True):
                    self.loading.setdefault(slice_id, {})[model] = None
                case act.Deactivate(model, slice_id):
                    self.loading.get(slice_id, {}).pop(model, None)
                case _:
                    pass


class TickTap:
    """A `runtime.ports.Recorder` of the controller's stream that keeps what the dashboard shows.

    It is called on the controller's thread and read on the event loop. A defect in it must not
    reach the controller's loop: it is logged once, and the timelines end there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.timelines = Timelines()
        self.controller = ControllerView()
        self.trouble = ""
        self.closed = False
        """The server ends, and so do the streams of its dashboard. Set on the event loop."""

    def begin_loop(self) -> None:
        with self._lock:
            self.timelines.begin_loop()

    def __call__(self, now: float, events: Sequence[object], actions: Sequence[object]) -> None:
        if self.trouble or not (events or actions):
            return
        try:
            with self._lock:
                self.timelines.tick(now, events, actions)
                self.controller.tick(events, actions)
        except Exception as fault:
            self.trouble = f"timelines ended: {type(fault).__name__}: {fault}"
            log.exception("the dashboard shows no more timelines")

    def answered(self, request_id: str, timing: Timing | None, output_tokens: int) -> None:
        """Take over what the slice measured for a request whose answer has ended."""
        with self._lock:
            one = self.timelines.find(request_id)
            if one is not None and timing is not None:
                one.tell(timing)
            if one is not None and one.output_tokens is None:
                one.output_tokens = output_tokens

    def controller_views(self, snapshot: Snapshot, now: float) -> "TapViews":
        with self._lock:
            targets = {one.id: targets_of(self.timelines, one.id, now) for one in snapshot.models}
            loading = {
                name: tuple(sorted(map(name_of, models)))
                for name, models in self.controller.loading.items()
            }
            return TapViews(
                dict(self.controller.slices), loading, targets, self.timelines.views(),
                self.timelines.refusals(), self.timelines.oldest_waiting_s(now),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TapViews:
    slices: dict[str, Slice]
    loading: dict[str, tuple[str, ...]]
    targets: dict[str, dict[str, float | int | None]]
    requests: tuple[RequestView, ...]
    refusals: tuple[RefusalView, ...]
    oldest_waiting_s: float


class LiveState:
    """Makes the state of a server. Rates are between two of its samples, some seconds apart."""

    def __init__(self, gateway: Gateway, tap: TickTap) -> None:
        self._gateway = gateway
        self._tap = tap
        self._samples: deque[tuple[float, dict[str, SliceStatus]]] = deque()

    def state(self) -> DashboardState | None:
        """Return the state, or None when the server ends."""
        if self._tap.closed:
            return None
        now, snapshot = time.monotonic(), self._gateway.snapshot()
        views = self._tap.controller_views(snapshot, now)
        before_s, before = self._before(now, snapshot)
        slices = tuple(
            _slice_view(one, before.get(one.id), now - before_s, views) for one in snapshot.slices
        )
        refused = Counter(
            {
                name: int(count)
                for name, count in snapshot.counters.items()
                if name.startswith(_REFUSED)
            }
        )
        return DashboardState(
            source="server", name=snapshot.instance, now_s=now, draining=snapshot.draining,
            pool_used_bytes=snapshot.pool_used_bytes, pool_budget_bytes=snapshot.pool_budget_bytes,
            slices=slices, links=links_of(views.slices, slices),
            models=tuple(_model_view(one, views) for one in snapshot.models),
            queue=QueueView(
                running=snapshot.running, waiting=snapshot.waiting,
                oldest_waiting_s=views.oldest_waiting_s, tenants=snapshot.tenants,
                refused=dict(refused), recent=views.refusals,
            ),
            requests=views.requests, trouble=self._tap.trouble,
        )  # fmt: skip

    def _before(self, now: float, snapshot: Snapshot) -> tuple[float, dict[str, SliceStatus]]:
        """Return the sample that rates are counted from, and keep the one of now."""
        samples = self._samples
        # The sample just outside the window stays: rates are over the time since it.
        while len(samples) > 1 and now - samples[1][0] >= WINDOW_S:
            samples.popleft()
        if samples and now - samples[-1][0] > WINDOW_S:
            samples.clear()  # no page has watched for a while: rates over that time would mislead
        samples.append((now, {one.id: one for one in snapshot.slices}))
        return samples[0]


def _slice_view(
    one: SliceStatus, before: SliceStatus | None, elapsed_s: float, views: TapViews
) -> SliceView:
    was = one if before is None or before.pid != one.pid else before
    spec = views.slices.get(one.id)

    def per_s(name: str) -> float:
        grown = getattr(one, name) - getattr(was, name)
        return max(0.0, grown) / elapsed_s if elapsed_s > 0.0 else 0.0

    peer = per_s("weights_peer_bytes")
    return SliceView(
        id=one.id, kind=one.kind, state=one.state, trouble=one.trouble, model=one.last_model,
        active_models=one.active_models, loading_models=views.loading.get(one.id, ()),
        resident_models=None, running=one.running, waiting=one.waiting, busy_share=one.busy_share,
        kv_used_bytes=one.kv_used_bytes, kv_total_bytes=one.kv_total_bytes,
        kv_host_bytes=one.kv_host_bytes, weights_kept_bytes=one.weights_kept_bytes,
        weights_lent_bytes=one.weights_lent_bytes, output_tokens_per_s=per_s("output_tokens"),
        streamed_bytes_per_s=max(0.0, per_s("weights_streamed_bytes") - peer),
        loaded_bytes_per_s=per_s("weight_fetched_bytes"), peer_bytes_per_s=peer,
        switches=one.switches, restarts=one.restarts, link="" if spec is None else link_of(spec),
    )  # fmt: skip


def _model_view(one: ModelStatus, views: TapViews) -> ModelView:
    return ModelView(
        id=one.id, state=one.state.value, error=one.error, pinned=one.pinned,
        weight_bytes=one.weight_bytes, pool_bytes=one.loaded_bytes,
        active_slices=one.active_slices, resident_slices=None, running=one.running,
        waiting=one.waiting, **views.targets[one.id],  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
