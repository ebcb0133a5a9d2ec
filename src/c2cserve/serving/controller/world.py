"""The controller's world when it is real: processes, messages and the clock.

`ControllerWorld` is the `Source` and the `Executor` of `runtime.driver.run` for `policy.cluster`.
Everything in it runs on the controller's thread, except `post`, which any thread may call.

A fault of one request ends that request, a fault of one load that load, a fault of one worker that
worker. Any other exception leaves `wait` or `submit` and ends the loop. `restart` then prepares a
fresh loop (`serving.controller.controller`).
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from c2cserve.core.actions import (
    Activate,
    Backlog,
    BaselineClusterAction,
    ClusterAction,
    Deactivate,
    Dispatch,
    Evict,
    Forget,
    Load,
    Preempt,
    Recall,
    Reject,
    Replace,
    ResizeKv,
    Withdraw,
)
from c2cserve.core.events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Draining,
    InstanceFailed,
    InstanceReady,
    InstanceRecovered,
    KvResized,
    Recalled,
    SliceLost,
    SliceUp,
    StepTimes,
)
from c2cserve.runtime.gateway import Refused, Superseded
from c2cserve.serving.controller.directory import Directory
from c2cserve.serving.controller.fleet import Fleet
from c2cserve.serving.controller.host import ModelHost
from c2cserve.serving.controller.inbox import Inbox
from c2cserve.serving.controller.jobs import JobTable, LiveJob, log_moved
from c2cserve.serving.controller.loaded_models import LoadedModels
from c2cserve.serving.controller.restart import RestartTick, restart_ticks
from c2cserve.serving.controller.workers import Garbled, Worker
from c2cserve.serving.ipc import messages as msg

log = logging.getLogger(__name__)

_TICK_S = 0.25
"""How often an idle controller checks its workers."""


class Aborted(Exception):
    """The server abandons the requests in flight (drain time is over, or no worker starts)."""


class ControllerWorld:
    def __init__(
        self,
        fleet: Fleet,
        host: ModelHost,
        directory: Directory,
        jobs: JobTable,
        flush: Callable[[], None],
        forgotten: Callable[[str], None],
        *,
        relays_tokens: bool = False,
    ) -> None:
        """`flush` is called after every batch of deltas; `forgotten` when a removal is complete.
        `relays_tokens`: the policy gets `events.TokensSent`."""
        self._relays_tokens = relays_tokens
        self._fleet = fleet
        self._host = host
        self._directory = directory
        self._jobs = jobs
        self._flush = flush
        self._forgotten = forgotten
        self.inbox = Inbox()
        self._checked_s = 0.0
        self._abort: str | None = None
        self._draining = False
        self._follow_ups: list[ClusterEvent] = []
        """Events that came of carrying out actions, for the next tick."""
        self._restart_ticks: deque[RestartTick] = deque()
        """Ticks that a fresh policy must still get before anything else."""
        self._restarted_request: str | None = None
        """The request that the present restart tick is about."""
        self._resets = 0
        self.counters: Counter[str] = Counter(
            models_given_up=0, controller_restarts=0, poison_requests=0, recalled_requests=0,
            instances_started=0, instances_ended=0, consolidated_requests=0, kv_resizes=0,
        )  # fmt: skip
        self._models = LoadedModels(fleet, host, directory, self.counters, self.post)
        self.last_tick_s = time.monotonic()
        self.backlog = Backlog()
        """The policy's latest one; other threads read it."""

    # ---- any thread ---------------------------------------------------------------------------

    def post(self, item: ClusterEvent | LiveJob) -> None:
        self.inbox.post(item)

    def abort(self, reason: str) -> None:
        self._abort = reason
        self.inbox.wake()

    # ---- Source -------------------------------------------------------------------------------

    def wait(self, until: float | None) -> tuple[float, Sequence[ClusterEvent]]:
        events: list[ClusterEvent] = []
        self._restarted_request = None
        while True:
            if not self._restart_ticks:
                self._collect(events)
            now = self.last_tick_s = time.monotonic()
            if self._abort is not None:
                raise Aborted(self._abort)
            if self._restart_ticks:
                entry = self._restart_ticks.popleft()
                self._restarted_request = entry.job
                return now, entry.events
            if events or (until is not None and now >= until):
                return now, [*self._jobs.tokens_sent(), *events] if self._relays_tokens else events
            rest_s = _TICK_S if until is None else min(_TICK_S, until - now)
            if self._fleet.poll(self.inbox.wake_fd, rest_s):
                self._checked_s = 0.0

    def _collect(self, events: list[ClusterEvent]) -> None:
        follow_ups, self._follow_ups = self._follow_ups, []
        events += follow_ups
        self._take_inbox(events)
        for slot in self._fleet.slots.values():
            if slot.worker is not None:
                slot.worker.channel.flush()
                self._take_messages(slot.worker, events)
        now = time.monotonic()
        if now - self._checked_s >= _TICK_S:
            self._checked_s = now
            for worker, reason in self._fleet.reap(now):
                self._lose(worker, reason, events)
            self._fleet.start_due(now)
        self._flush()

    def _take_inbox(self, events: list[ClusterEvent]) -> None:
        for item in self.inbox.take():
            if isinstance(item, LiveJob):
                self._jobs.add(item)
                events.append(Arrived(item.request))
            elif isinstance(item, Cancelled):
                # The request may have ended by itself before the cancellation arrived.
                live = self._jobs.drop(item.request_id)
                if live is not None:
                    events.append(item)
            elif self._models.note(item):
                self._draining |= isinstance(item, Draining)
                events.append(item)

    def _take_messages(self, worker: Worker, events: list[ClusterEvent]) -> None:
        try:
            for message in worker.receive():
                events.extend(self._take_message(worker, message))
        except Garbled as error:
            log.error("slice %s: its worker ends, for it sent no valid message: %s",
                      worker.slice.id, error)  # fmt: skip
            worker.kill()

    def _take_message(self, worker: Worker, message: msg.ToController) -> Iterator[ClusterEvent]:
        match message:
            case msg.Hello():
                yield from self._greet(worker, message)
            case msg.Unusable():
                if (failed := self._models.unusable(worker.slice.id, message)) is not None:
                    yield failed
            case msg.Attached():
                self._models.attached(worker.slice.id, message)
            case msg.ResetDone(number) if number == worker.resetting:
                worker.resetting = 0
                yield SliceUp(worker.slice)
            case _ if worker.resetting:
                pass  # about requests and models that it no longer has
            case msg.Output(deltas):
                now = time.monotonic()
                for delta in deltas:
                    receive = partial(self._jobs.receive, delta, now)
                    yield from self._guarded(delta.request_id, receive)
            case msg.Measured(model, decode_step_s, prefill_token_s):
                self._models.measured(message)
                yield StepTimes(worker.slice.id, model, decode_step_s, prefill_token_s)
            case msg.Ready(model, took_s):
                yield InstanceReady(model, worker.slice.id, took_s)
            case msg.Returned(request_id):
                give_back = partial(self._give_back, request_id, worker.slice.id)
                yield from self._guarded(request_id, give_back)
            case msg.Failed() | msg.Recovered():
                yield from self._take_failure(worker.slice.id, message)
            case msg.ResetDone():
                pass

    def _guarded(
        self, request_id: str, handle: Callable[[], Iterable[ClusterEvent]]
    ) -> list[ClusterEvent]:
        """An exception while one request is handled ends that request."""
        try:
            return list(handle())
        except Exception as fault:
            log.exception("request %s cannot be handled", request_id, extra={"job": request_id})
            return [*self._jobs.blame(request_id, fault)]

    def _greet(self, worker: Worker, hello: msg.Hello) -> Iterator[ClusterEvent]:
        log.info(
            "slice %s is up (pid %d, epoch %d, cpus %s, %s)",
            worker.slice.id, worker.pid, hello.epoch, worker.slice.cpus, hello.isa,
        )  # fmt: skip
        worker.up = True
        self._models.attach_all(worker)
        yield SliceUp(worker.slice)

    def _give_back(self, request_id: str, slice_id: str) -> Iterator[ClusterEvent]:
        event = self._jobs.give_back(request_id, slice_id)
        if event is not None:
            self.counters["recalled_requests"] += isinstance(event, Recalled)
            yield event

    def _take_failure(
        self, slice_id: str, message: msg.Failed | msg.Recovered
    ) -> Iterator[ClusterEvent]:
        """Handle a slice's report of a model that fails there. Forgotten models are left out."""
        record = self._directory.version(message.model)
        if record is None:
            return
        match message:
            case msg.Failed(model, reason, others_work):
                log.error("slice %s: every request of %s fails: %s", slice_id, model, reason)
                record.failing[slice_id] = reason
                self.counters["models_given_up"] += 1
                yield InstanceFailed(slice_id, model, reason, others_work)
            case msg.Recovered(model):
                log.info("slice %s: %s works again", slice_id, model)
                record.failing.pop(slice_id, None)
                yield InstanceRecovered(slice_id, model)

    def _lose(self, worker: Worker, reason: str, events: list[ClusterEvent]) -> None:
        """Read the last messages of a dead worker, then place its requests again."""
        if not worker.up:
            return
        slice_id = worker.slice.id
        self._take_messages(worker, events)
        self._models.lost(slice_id)
        if self._jobs.suspected(slice_id):
            self._fleet.excuse(slice_id)
        displaced, failed = self._jobs.displace(slice_id)
        log_moved([request.id for request in displaced], f"slice {slice_id} was lost: {reason}")
        events += failed
        events.append(SliceLost(slice_id, displaced))
        self.counters["slice_lost"] += 1

    # ---- starting anew ------------------------------------------------------------------------

    def restart(self) -> bool:
        """Prepare for a fresh policy: reset all workers, and queue the restart ticks. Return
        whether one request was at fault; it has failed then.

        All requests continue from what their clients have. That cannot change meanwhile: a worker's
        messages about requests are void until its `ResetDone`, and it gets no request before.
        """
        self._resets += 1
        self.counters["controller_restarts"] += 1
        culprit, self._restarted_request = self._restarted_request, None
        if culprit is not None:
            log.error("request %s breaks the controller's loop", culprit, extra={"job": culprit})
            fault = RuntimeError("the controller's loop broke when it was told of this request")
            self._jobs.blame(culprit, fault)
        self._models.nothing_active()
        log_moved(self._jobs.withdraw_all(), "the controller's loop started anew")
        self._follow_ups.clear()
        self.backlog = Backlog()
        for worker in self._fleet.up:
            worker.reset(self._resets)
            self._models.attach_all(worker)
        self._restart_ticks = deque(
            restart_ticks(
                self._host.budget_bytes, self._directory, self._models.announced, self._jobs,
                draining=self._draining,
            )
        )  # fmt: skip
        return culprit is not None

    # ---- Executor -----------------------------------------------------------------------------

    def submit(self, action: ClusterAction | BaselineClusterAction) -> None:
        match action:
            case Dispatch() | Withdraw() | Reject() | Recall() | Preempt():
                carry_out = partial(self._carry_out, action)
                self._follow_ups += self._guarded(action.request_id, carry_out)
            case Load(model):
                self._models.load(model)
            case Activate(model, slice_id, keep):
                self.counters["instances_started"] += 1
                self._directory.get(model).slices.add(slice_id)
                self._send(slice_id, msg.Switch(model, active=True, keep=keep))
            case Deactivate(model, slice_id):
                self.counters["instances_ended"] += 1
                self._directory.get(model).slices.discard(slice_id)
                self._send(slice_id, msg.Switch(model, active=False))
            case ResizeKv(model, slice_id, kv_bytes):
                # All instances of a slice share its arena: there is nothing to move.
                self.counters["kv_resizes"] += 1
                self._follow_ups.append(KvResized(model, slice_id, kv_bytes))
            case Evict(model):
                self._models.evict(model)
            case Forget(model):
                self._models.forget(model)
                self._forgotten(model)
            case Replace(slice_id, reason):
                self._replace(slice_id, reason)
            case Backlog():
                self.backlog = action

    def _carry_out(
        self, action: Dispatch | Withdraw | Reject | Recall | Preempt
    ) -> Sequence[ClusterEvent]:
        match action:
            case Dispatch(request_id, slice_id):
                if (live := self._jobs.get(request_id)) is not None:
                    live.dispatch(slice_id)
                    self._send(slice_id, msg.Submit(live.job))
            case Withdraw(request_id, slice_id):
                self._send(slice_id, msg.Withdraw(request_id))
            case Recall(request_id, slice_id) | Preempt(request_id, slice_id):
                running = isinstance(action, Preempt)
                self.counters["consolidated_requests"] += running
                if (live := self._jobs.get(request_id)) is not None:
                    live.recalled = True
                    self._send(slice_id, msg.Recall(request_id, running))
            case Reject(request_id, 500, reason):
                return self._fail(request_id, reason)
            case Reject():
                self._reject(action)
        return ()

    def _fail(self, request_id: str, reason: str) -> Sequence[ClusterEvent]:
        """End a request that kills its workers."""
        log.error("request %s failed: %s", request_id, reason, extra={"job": request_id})
        self.counters["poison_requests"] += 1
        events = self._jobs.fail(request_id, reason)
        self._flush()
        return events

    def _reject(self, reject: Reject) -> None:
        live = self._jobs.drop(reject.request_id)
        record = None if live is None else self._directory.version(live.request.model)
        replaced = record is None or record.superseded
        if live is not None and live.unsent and replaced:
            live.sink(Superseded())
        else:
            self.counters[f"rejected_{reject.status}"] += 1
            if reject.limit:
                self.counters[f"refused_{reject.limit}"] += 1
            if live is not None:
                live.sink(self._refusal(reject))
        self._flush()

    def _refusal(self, reject: Reject) -> Refused:
        """Return the answer to a refused request. While no slice is up, its retry time is not
        before one can be."""
        outage = self._fleet.outage(time.monotonic())
        if reject.status != 503 or outage is None:
            return Refused(reject.status, reject.reason, reject.retry_after_s)
        reason = f"{reject.reason}: {outage.reason}"
        return Refused(503, reason, max(reject.retry_after_s, outage.retry_s))

    def _send(self, slice_id: str, message: msg.ToWorker) -> None:
        worker = self._fleet.worker(slice_id)
        if worker is not None:
            worker.send(message)

    def _replace(self, slice_id: str, reason: str) -> None:
        worker = self._fleet.worker(slice_id)
        if worker is not None:
            log.error("slice %s: nothing works any more, its process ends: %s", slice_id, reason)
            worker.kill()

    def close(self, grace_s: float) -> None:
        """End all workers. Events may still be posted; they are never read."""
        self._fleet.close(grace_s)
