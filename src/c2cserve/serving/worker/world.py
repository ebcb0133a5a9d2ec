"""A worker's world when it is real: the controller's messages, the engine, the clock.

`WorkerWorld` is the `Source` and the `Executor` of `runtime.driver.run` for `policy.slice`. A step
runs inline in `submit`, or `submit` launches it and the engine calls `notify` at its end, which
wakes `wait`. A second thread only keeps the clock of the status page going.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from c2cserve.core.actions import (
    BaselineSliceAction,
    Fetch,
    GiveUp,
    Recover,
    Release,
    Return,
    RunStep,
    SliceAction,
)
from c2cserve.core.events import (
    Activated,
    Deactivated,
    Fetched,
    RecallAsked,
    SliceEvent,
    StepDone,
    StepFailed,
    StepParked,
    Submitted,
    Withdrawn,
)
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Delta, FinishReason, Job
from c2cserve.core.step import Lane
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.ipc import messages as msg
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.status_page import Field, StatusPage
from c2cserve.serving.worker.loop_times import LoopTimes
from c2cserve.serving.worker.publishing import Publishing
from c2cserve.serving.worker.slice_engine import SliceEngine

log = logging.getLogger(__name__)

_BEAT_S = 0.5
_PARKED_POLL_S = 0.001
"""How soon a parked step notices that its weights have arrived."""
_IN_FLIGHT, _BUBBLE = ("in_flight_seconds",), ("bubble_seconds",)
_LOADING = ("bubble_seconds", "loading_bubble_seconds")


class Quitting(Exception):
    """The controller sent `Quit`, or is gone."""


class WorkerWorld:
    def __init__(
        self,
        channel: Channel,
        page: StatusPage,
        policy_stats: Callable[[], SliceStats],
        measured: Callable[[], Sequence[msg.Measured]],
    ) -> None:
        self._channel = channel
        self._page = page
        self._publishing = Publishing(channel, page, policy_stats, measured)
        self._engine: SliceEngine | None = None
        self._specs: dict[str, ModelSpec] = {}
        self._attach_order: dict[str, int] = {}
        self._attaches = 0
        self._events: list[SliceEvent] = []
        self._messages: deque[bytes] = deque()
        """Messages that arrived during a reset; they are handled when it is done."""
        self._accepted: set[str] = set()
        """Requests that were accepted and have not ended or been returned."""
        self._active: set[str] = set()
        """Active models."""
        self._resetting: int | None = None
        self._last_models: dict[Lane, str] = {}
        self._in_flight: dict[int, tuple[Lane, float]] = {}
        """Steps that were submitted and have neither ended nor parked -> lane, time of submission.
        """
        self._notifier = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loading: set[str] = set()
        """Whole models that are being loaded."""
        self._times = LoopTimes(page.add_stat)
        self._stop = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="beat", daemon=True)

    def start(self, engine: SliceEngine, isa: str, epoch: int) -> None:
        self._engine = engine
        self._beat_once()
        self._page[Field.PROGRESS_S] = time.monotonic()
        self._beating.start()
        self._channel.send(msg.encode(msg.Hello(epoch, isa)))

    def stop(self) -> None:
        self._stop.set()
        self._beating.join()

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self._beat_once()

    def _beat_once(self) -> None:
        self._page[Field.BEAT_S] = time.monotonic()

    @property
    def engine(self) -> SliceEngine:
        assert self._engine is not None
        return self._engine

    # ---- what the engine reports ----------------------------------------------------------------

    def report(self, event: SliceEvent | None, deltas: Sequence[Delta]) -> None:
        """Take what the engine reports together: deltas for clients, which are sent at once, and an
        event for the policy."""
        if deltas:
            self._deliver(deltas)
        if event is None:
            return
        self._events.append(event)
        if isinstance(event, StepDone | StepFailed | StepParked):
            self._note_outcome(event)
        elif isinstance(event, Fetched):
            self._loading.discard(event.model)
            self._note_state()
            self._channel.send(msg.encode(msg.Ready(event.model, event.took_s)))

    def _note_outcome(self, event: StepDone | StepFailed | StepParked) -> None:
        now = time.monotonic()
        lane, _ = self._in_flight.pop(event.step_id, ("resident", now))
        self._page[Field.STEP_STARTED_S] = now if self._in_flight else 0.0
        if isinstance(event, StepDone):
            self._page.add(Field.BUSY_S, event.compute_s)
            self._page.add_stat("steps", 1)
            # A lane that hangs is not hidden by the other one's progress.
            beside = [since_s for other, since_s in self._in_flight.values() if other != lane]
            progress_s = max(self._page[Field.PROGRESS_S], min([now, *beside]))
            self._page[Field.PROGRESS_S] = progress_s
        elif isinstance(event, StepFailed):
            self._page.add_stat("step_failures", 1)
        self._note_state()

    def _note_state(self) -> None:
        """Note whether a step is in flight, and if not, whether requests wait for one."""
        if self._in_flight:
            self._times.slice_is(_IN_FLIGHT)
        elif self._accepted:
            self._times.slice_is(_LOADING if self._loading else _BUBBLE)
        else:
            self._times.slice_is(())

    def notify(self) -> None:
        """Wake `wait`, because the engine has something to poll. Callable from any thread."""
        os.eventfd_write(self._notifier, 1)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        self._page.add_stat("output_tokens", sum(len(delta.tokens) for delta in deltas))
        ended = [delta.request_id for delta in deltas if delta.finish is not None]
        if ended:
            self._accepted.difference_update(ended)
            self._note_state()
        self._channel.send(msg.encode(msg.Output(tuple(deltas))))

    # ---- Source ---------------------------------------------------------------------------------

    def wait(self, until: float | None) -> tuple[float, Sequence[SliceEvent]]:
        page, times = self._page, self._times
        times.lap("policy_seconds")
        self._publishing.report_measured(time.monotonic())
        while True:
            self._take_messages()
            state = self.engine.poll()
            for job in state.prepared:
                if job.request.id in self._accepted:
                    self._add(job)
                else:  # it was withdrawn before the engine set it aside
                    self.engine.forget(job.request.id)
            for one in state.unusable:  # the controller has it detached
                log.error("%s cannot be used: %s", one.model, one.reason)
                self._channel.send(msg.encode(msg.Unusable(one.model, one.segment, one.reason)))
            self._end_reset()
            now = time.monotonic()
            rests = not (self._events or self._in_flight)
            if rests or self._publishing.due(now):
                times.publish()
                self._publishing.publish(self.engine.stats, now)
            if state.parked or not page.has_requests:
                page[Field.PROGRESS_S] = now
            if self._events or (until is not None and now >= until):
                events, self._events = self._events, []
                times.lap("poll_seconds")
                return now, events
            timeout_s = _BEAT_S if until is None else min(_BEAT_S, until - now)
            times.lap("poll_seconds")
            self._channel.wait(_PARKED_POLL_S if state.parked else timeout_s, self._notifier)
            times.lap("sleep_seconds")
            with contextlib.suppress(BlockingIOError):  # no notification
                os.eventfd_read(self._notifier)

    def _take_messages(self) -> None:
        self._messages.extend(self._channel.receive())
        while self._messages and self._resetting is None:
            self._take(self._decode(self._messages.popleft()))
        if self._channel.closed:
            raise Quitting

    def _decode(self, data: bytes) -> msg.ToWorker | None:
        """Decode a message. Return None for a request that does not decode, which has failed then.
        Raises for other messages."""
        try:
            return msg.decode_to_worker(data)
        except msgspec.MsgspecError as fault:
            request_id = msg.submitted_id(data)
            if request_id is None:
                raise
            self._refuse(request_id, fault)
            return None

    def _take(self, message: msg.ToWorker | None) -> None:
        match message:
            case msg.Submit(job):
                self._accept(job)
            case msg.Withdraw(request_id):
                self._accepted.discard(request_id)
                self._note_state()
                if not self.engine.forget(request_id):
                    self._events.append(Withdrawn(request_id))
            case msg.Recall(request_id, running):
                if self.engine.forget(request_id):
                    self._returned(request_id)
                else:
                    self._events.append(RecallAsked(request_id, running))
            case msg.Switch(model, active, keep):
                self._switch(model, active=active, keep=keep)
            case msg.Attach():
                self._attach(message)
            case msg.Detach(model):
                self._detach(model)
            case msg.Reset(number):
                self._reset(number)
            case msg.Quit():
                raise Quitting
            case None:
                pass

    def _accept(self, job: Job) -> None:
        """Add a request, or have it prepared first."""
        request = job.request
        self._page.add_stat("prompt_tokens", request.prompt_len - request.sent)
        try:
            ready = self.engine.prepare(job)
        except Exception as fault:
            log.exception("request %s cannot be taken", request.id)
            self._refuse(request.id, fault)
            return
        self._accepted.add(request.id)
        self._note_state()
        if ready:
            self._add(job)

    def _returned(self, request_id: str) -> None:
        self._accepted.discard(request_id)
        self._note_state()
        self._channel.send(msg.encode(msg.Returned(request_id)))

    def _add(self, job: Job) -> None:
        request = job.request
        try:
            if request.model not in self._active:
                raise RuntimeError(f"{request.model} is not active on this slice")
            chained = self.engine.add(job)
        except Exception as fault:  # which must not end the slice's other requests
            log.exception("request %s cannot be taken", request.id)
            self.engine.forget(request.id)
            self._refuse(request.id, fault)
        else:
            self._events.append(Submitted(request, chained))

    def _refuse(self, request_id: str, fault: Exception) -> None:
        error = f"{type(fault).__name__}: {fault}"
        self._deliver([Delta(request_id, finish=FinishReason.ERROR, error=error)])

    def _switch(self, model: str, *, active: bool, keep: bool = False) -> None:
        """Activate or deactivate a model. A model that is not attached stays inactive: its requests
        fail one by one."""
        if active and model in self._specs:
            self._active.add(model)
            self._events.append(Activated(self._specs[model], keep))
        elif not active and model in self._active:
            self._active.remove(model)
            self._events.append(Deactivated(model))

    # ---- beginning anew -------------------------------------------------------------------------

    def _reset(self, number: int) -> None:
        """Withdraw all requests and deactivate all models. Later messages wait until that is done:
        they may be about the same requests and models."""
        log.warning("the controller's loop started anew: %d requests end here", len(self._accepted))
        self._resetting = number
        for request_id in sorted(self._accepted):
            if not self.engine.forget(request_id):
                self._events.append(Withdrawn(request_id))
        for model in sorted(self._active):
            self._switch(model, active=False)
        self._accepted.clear()
        self._note_state()

    def _end_reset(self) -> None:
        """End a reset when the policy has seen all withdrawals and holds no request, not even in a
        step in flight. No token is sampled or sent for those requests from then on."""
        if self._resetting is None or self._events:
            return
        held = self._publishing.policy_stats()
        if not held.running and not held.waiting and not self._in_flight:
            self._channel.send(msg.encode(msg.ResetDone(self._resetting)))
            self._resetting = None
            self._take_messages()

    # ---- models ---------------------------------------------------------------------------------

    def _attach(self, message: msg.Attach) -> None:
        model = message.spec.id
        self._specs[model] = message.spec
        self._attach_order[model] = self._attaches
        self._attaches += 1
        try:
            self.engine.attach(message.spec, message.segment, message.config, message.dtype)
        except Exception as fault:
            # A model that cannot be used here must not end the slice, which has others.
            if isinstance(fault, FileNotFoundError):  # evicted, as a rule: the controller knows
                log.info("attach of %s: %s is gone", model, message.segment)
            else:
                log.exception("attach of %s failed", model)
            self._channel.send(msg.encode(msg.Unusable(model, message.segment, str(fault))))
        else:
            self._channel.send(msg.encode(msg.Attached(model, message.segment)))

    def _detach(self, model: str) -> None:
        self._switch(model, active=False)
        self._specs.pop(model, None)
        try:
            self.engine.detach(model)
        except Exception:
            # Its memory may stay taken here; the slice has other models.
            log.exception("detach of %s failed", model)

    # ---- Executor -------------------------------------------------------------------------------

    def submit(self, action: SliceAction | BaselineSliceAction) -> None:
        self._times.lap("policy_seconds")
        if isinstance(action, RunStep):
            self._run(action)
            self._times.lap("submit_seconds")
        else:
            self._act(action)
            self._times.lap("action_seconds")

    def _act(self, action: SliceAction | BaselineSliceAction) -> None:
        match action:
            case GiveUp(model, reason, others_work):
                self._channel.send(msg.encode(msg.Failed(model, reason, others_work)))
            case Recover(model):
                self._channel.send(msg.encode(msg.Recovered(model)))
            case Return(request_id):
                self.engine.submit(action)
                self._returned(request_id)
            case Fetch(model) | Release(model):
                (self._loading.add if isinstance(action, Fetch) else self._loading.discard)(model)
                self._note_state()
                self.engine.submit(action)
            case _:
                self.engine.submit(action)

    def _run(self, action: RunStep) -> None:
        page = self._page
        model, lane = action.step.model, action.step.lane
        if model != self._last_models.get(lane):
            page.add_stat("switches", 1 if lane in self._last_models else 0)
            self._last_models[lane] = model
            page[Field.LAST_MODEL] = self._attach_order[model]
        now = time.monotonic()
        if not self._in_flight:
            page[Field.STEP_STARTED_S] = now
        self._in_flight[action.step.id] = lane, now
        self._note_state()
        self.engine.submit(action)
