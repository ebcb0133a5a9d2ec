"""The controller's world when it is real: processes, messages and the clock.

`World` is the `Source` and the `Executor` of `runtime.driver.run` for `policy.cluster`. Everything
in it runs on the controller's thread, except `post`, which any thread may call.
"""

import logging
import os
import select
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

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
    Replace,
    ResizeKv,
    Withdraw,
)
from c2cserve.core.events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    InstanceFailed,
    InstanceRecovered,
    ModelFailed,
    ModelLoaded,
    ModelRemoving,
    ModelUsable,
    Returned,
    SliceLost,
    SliceUp,
    StepTimes,
)
from c2cserve.core.model import ModelState
from c2cserve.runtime.gateway import Refused, Superseded
from c2cserve.runtime.live import messages as msg
from c2cserve.runtime.live.directory import Directory, ModelRecord
from c2cserve.runtime.live.fleet import Fleet
from c2cserve.runtime.live.host import ModelHost
from c2cserve.runtime.live.jobs import JobTable, LiveJob
from c2cserve.runtime.live.workers import Worker

log = logging.getLogger(__name__)

_TICK_S = 0.25
"""How often an idle controller looks after its workers."""


class Aborted(Exception):
    """The server gives up on what is in flight (drain time is over, or no worker starts)."""


class World:
    def __init__(
        self,
        fleet: Fleet,
        host: ModelHost,
        directory: Directory,
        jobs: JobTable,
        flush: Callable[[], None],
        forgotten: Callable[[str], None],
    ) -> None:
        """`flush` is called after every batch of deltas; `forgotten` when a removal is complete."""
        self._fleet = fleet
        self._host = host
        self._directory = directory
        self._jobs = jobs
        self._flush = flush
        self._forgotten = forgotten
        self._inbox: deque[ClusterEvent | LiveJob] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Loaders and signals may post until the process ends: its number is not given away before.
        weakref.finalize(self, os.close, self._wake_fd)
        self._looked_s = 0.0
        self._abort: str | None = None
        self.counters: Counter[str] = Counter()
        self.last_tick_s = time.monotonic()

    # ---- any thread ---------------------------------------------------------------------------

    def post(self, item: ClusterEvent | LiveJob) -> None:
        self._inbox.append(item)
        os.eventfd_write(self._wake_fd, 1)

    def abort(self, reason: str) -> None:
        self._abort = reason
        os.eventfd_write(self._wake_fd, 1)

    # ---- Source -------------------------------------------------------------------------------

    def wait(self, until: float | None) -> tuple[float, Sequence[ClusterEvent]]:
        events: list[ClusterEvent] = []
        while True:
            self._collect(events)
            now = self.last_tick_s = time.monotonic()
            if self._abort is not None:
                raise Aborted(self._abort)
            if events or (until is not None and now >= until):
                return now, events
            self._poll(_TICK_S if until is None else min(_TICK_S, until - now))

    def _poll(self, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        for slot in self._fleet.slots.values():
            if slot.worker is not None:
                poller.register(slot.worker.pidfd, select.POLLIN)
                if not slot.worker.channel.closed:
                    poller.register(slot.worker.channel, slot.worker.channel.interest)
        ready = dict(poller.poll(max(1, int(timeout_s * 1000))))
        if any(slot.worker and slot.worker.pidfd in ready for slot in self._fleet.slots.values()):
            self._looked_s = 0.0

    def _collect(self, events: list[ClusterEvent]) -> None:
        self._take_inbox(events)
        for slot in self._fleet.slots.values():
            if slot.worker is not None:
                slot.worker.channel.flush()
                self._take_messages(slot.worker, events)
        now = time.monotonic()
        if now - self._looked_s >= _TICK_S:
            self._looked_s = now
            for worker, _ in self._fleet.reap(now):
                self._bury(worker, events)
            self._fleet.start_due(now)
        self._flush()

    def _take_inbox(self, events: list[ClusterEvent]) -> None:
        if select.select([self._wake_fd], [], [], 0)[0]:
            os.eventfd_read(self._wake_fd)
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, LiveJob):
                self._jobs.add(item)
                events.append(Arrived(item.request))
            elif isinstance(item, Cancelled):
                # The request may have ended by itself while the word was on its way.
                live = self._jobs.drop(item.request_id)
                if live is not None:
                    events.append(item)
            elif self._note_model(item):
                events.append(item)

    def _note_model(self, event: ClusterEvent) -> bool:
        """Keep the directory up to date. False: the model was forgotten meanwhile (its last load
        may still report), nobody needs to hear of it."""
        model = getattr(event, "model", None)
        if model is not None and model not in self._directory:
            return False
        match event:
            case ModelUsable(model):
                record = self._directory.get(model)
                segment = self._host.segment(model)
                if record.state is not ModelState.LOADING or segment is None:
                    return False  # given up, or failed, while the word was on its way
                record.segment = segment
                for worker in self._fleet.up:
                    self._attach(worker, record)
            case ModelLoaded(model):
                record = self._directory.get(model)
                if record.state is ModelState.LOADING:
                    record.state = ModelState.READY
                self.counters["model_loads"] += 1
            case ModelFailed(model, reason):
                log.error("model %s: %s", model, reason)
                record = self._directory.get(model)
                if record.in_pool:
                    self._fleet.broadcast(msg.Detach(model))
                record.out_of_pool(ModelState.FAILED, reason)
                self.counters["model_load_failures"] += 1
            case ModelRemoving(model):
                self._directory.get(model).draining = True
            case _:
                pass
        return True

    def _take_messages(self, worker: Worker, events: list[ClusterEvent]) -> None:
        for message in worker.receive():
            match message:
                case msg.Output(deltas):
                    now = time.monotonic()
                    for delta in deltas:
                        events.extend(self._jobs.receive(delta, now))
                case msg.Measured(model, decode_step_s, prefill_token_s):
                    events.append(StepTimes(worker.slice.id, model, decode_step_s, prefill_token_s))
                case msg.Hello(epoch=epoch, isa=isa):
                    log.info(
                        "slice %s is up (pid %d, epoch %d, cpus %s, %s)",
                        worker.slice.id, worker.pid, epoch, worker.slice.cpus, isa,
                    )  # fmt: skip
                    worker.up = True
                    for record in self._directory:
                        if record.in_pool:
                            self._attach(worker, record)
                    events.append(SliceUp(worker.slice))
                case msg.Unusable(model, reason, segment) if self._is_mapped(model, segment):
                    failed = ModelFailed(model, f"slice {worker.slice.id}: {reason}")
                    if self._note_model(failed):
                        self._host.evict(model)
                        events.append(failed)
                case msg.Attached(model, segment) if self._is_mapped(model, segment):
                    self._directory.get(model).attached.add(worker.slice.id)
                case msg.Unusable() | msg.Attached():
                    pass  # it has left the pool since, and what is said of it is over
                case _:
                    events.extend(self._take_trouble(worker.slice.id, message))

    def _take_trouble(
        self, slice_id: str, message: msg.Failed | msg.Recovered | msg.Returned
    ) -> Iterator[ClusterEvent]:
        """What a slice says of models that fail there; events of forgotten models are left out."""
        match message:
            case msg.Returned(request_id):
                request = self._jobs.give_back(request_id, slice_id)
                if request is not None:
                    yield Returned(request)
            case msg.Failed(model, reason, others_work):
                if (record := self._directory.version(model)) is not None:
                    log.error("slice %s: every request of %s fails: %s", slice_id, model, reason)
                    record.failing[slice_id] = reason
                    self.counters["models_given_up"] += 1
                    yield InstanceFailed(slice_id, model, reason, others_work)
            case msg.Recovered(model):
                if (record := self._directory.version(model)) is not None:
                    log.info("slice %s: %s works again", slice_id, model)
                    record.failing.pop(slice_id, None)
                    yield InstanceRecovered(slice_id, model)

    def _is_mapped(self, model: str, segment: str) -> bool:
        """Whether this is the segment that workers are to map for the model now."""
        record = self._directory.version(model)
        return record is not None and record.segment == segment

    def _bury(self, worker: Worker, events: list[ClusterEvent]) -> None:
        """Take the last words of a dead worker, then place its requests again."""
        if not worker.up:
            return
        self._take_messages(worker, events)
        for record in self._directory:
            record.slices.discard(worker.slice.id)
            record.failing.pop(worker.slice.id, None)
            record.attached.discard(worker.slice.id)
        displaced, failed = self._jobs.displace(worker.slice.id)
        events += failed
        events.append(SliceLost(worker.slice.id, displaced))
        self.counters["slice_lost"] += 1

    # ---- Executor -----------------------------------------------------------------------------

    def submit(self, action: ClusterAction) -> None:
        match action:
            case Dispatch(request_id, slice_id):
                live = self._jobs.get(request_id)
                if live is not None:
                    live.slice_id = slice_id
                    self._send(slice_id, msg.Submit(live.job))
            case Withdraw(request_id, slice_id):
                self._send(slice_id, msg.Withdraw(request_id))
            case Reject():
                self._reject(action)
            case Activate(model, slice_id):
                self._directory.get(model).slices.add(slice_id)
                self._send(slice_id, msg.Switch(model, active=True))
            case Deactivate(model, slice_id):
                self._directory.get(model).slices.discard(slice_id)
                self._send(slice_id, msg.Switch(model, active=False))
            case Load(model):
                record = self._directory.get(model)
                record.state = ModelState.LOADING
                record.error = ""
                self._host.load(record.hosted)
            case Evict(model):
                self._unload(self._directory.get(model))
                self.counters["model_evictions"] += 1
            case Forget(model):
                self._unload(self._directory.get(model))
                self._directory.remove(model)
                self._forgotten(model)
            case Replace(slice_id, reason):
                self._replace(slice_id, reason)
            case ResizeKv() | Recall():
                raise TypeError(f"only simulated rivals do this: {action}")

    def _reject(self, reject: Reject) -> None:
        live = self._jobs.drop(reject.request_id)
        record = None if live is None else self._directory.version(live.request.model)
        replaced = record is None or record.superseded
        if live is not None and live.untold and replaced:
            live.sink(Superseded())
        else:
            self.counters[f"rejected_{reject.status}"] += 1
            if live is not None:
                live.sink(Refused(reject.status, reject.reason, reject.retry_after_s))
        self._flush()

    def _send(self, slice_id: str, message: msg.ToWorker) -> None:
        worker = self._fleet.worker(slice_id)
        if worker is not None:
            worker.send(message)

    def _replace(self, slice_id: str, reason: str) -> None:
        worker = self._fleet.worker(slice_id)
        if worker is not None:
            log.error("slice %s: nothing works any more, its process ends: %s", slice_id, reason)
            worker.kill()

    def _unload(self, record: ModelRecord) -> None:
        self._fleet.broadcast(msg.Detach(record.id))
        record.out_of_pool()
        self._host.evict(record.id)

    def _attach(self, worker: Worker, record: ModelRecord) -> None:
        hosted = record.hosted
        worker.send(msg.Attach(hosted.spec, record.segment, hosted.config, hosted.dtype))
        worker.attached.append(record.id)

    def close(self, grace_s: float) -> None:
        """End all workers. Events may still be posted; they are never read."""
        self._fleet.close(grace_s)
