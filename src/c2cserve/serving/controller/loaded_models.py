"""Pool residency of models: loading and evicting them, attaching them to workers and detaching
them."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from c2cserve.core.events import (
    ClusterEvent,
    ModelAdded,
    ModelFailed,
    ModelLoaded,
    ModelRemoving,
    ModelUsable,
)
from c2cserve.core.model import ModelState
from c2cserve.serving.controller.directory import Directory, ModelRecord
from c2cserve.serving.controller.fleet import Fleet
from c2cserve.serving.controller.host import ModelHost
from c2cserve.serving.controller.workers import Worker
from c2cserve.serving.ipc import messages as msg

log = logging.getLogger(__name__)


class LoadedModels:
    """Keeps the pool, the directory and the workers in step. Used by the controller's thread alone.
    A model that cannot be loaded or attached becomes `failed`; the server goes on."""

    def __init__(
        self,
        fleet: Fleet,
        host: ModelHost,
        directory: Directory,
        counters: Counter[str],
        post: Callable[[ClusterEvent], None],
    ) -> None:
        """`post` hands an event to the controller's loop."""
        self._fleet = fleet
        self._host = host
        self._directory = directory
        self._counters = counters
        self._post = post
        self.announced: dict[str, str] = {}
        """Versions that the policy was notified of -> the versions that they replace."""

    def note(self, event: ClusterEvent) -> bool:
        """Update the directory by an event. Return whether the policy must see the event. It need
        not if the model was forgotten or given up meanwhile: its last load may still report."""
        model = getattr(event, "model", None)
        if model is not None and model not in self._directory:
            return False
        match event:
            case ModelAdded(spec, replaces):
                self.announced[spec.id] = replaces
            case ModelUsable(model):
                record, segment = self._directory.get(model), self._host.segment(model)
                if record.state is not ModelState.LOADING or segment is None:
                    return False  # given up, or failed, before this event arrived
                record.segment = segment
                self._attach(record, self._fleet.up)
            case ModelLoaded(model):
                record = self._directory.get(model)
                if record.state is not ModelState.LOADING:
                    return False  # given up before this event arrived: it is not in the pool
                record.state = ModelState.READY
                self._counters["model_loads"] += 1
            case ModelFailed(model, reason):
                log.error("model %s: %s", model, reason)
                self._unload(self._directory.get(model), ModelState.FAILED, reason)
                self._counters["model_load_failures"] += 1
            case ModelRemoving(model):
                self._directory.get(model).draining = True
            case _:
                pass
        return True

    # ---- the pool -------------------------------------------------------------------------------

    def load(self, model: str) -> None:
        """Begin to load a model. Any failure is posted as `ModelFailed`."""
        record = self._directory.get(model)
        record.state = ModelState.LOADING
        record.error = ""
        try:
            self._host.load(record.hosted)
        except Exception as fault:
            log.exception("load of %s", model)
            self._fail(model, fault)

    def evict(self, model: str) -> None:
        self._unload(self._directory.get(model))
        self._counters["model_evictions"] += 1

    def forget(self, model: str) -> None:
        self._unload(self._directory.get(model))
        self._directory.remove(model)
        self.announced.pop(model, None)

    def _unload(
        self, record: ModelRecord, state: ModelState = ModelState.COLD, error: str = ""
    ) -> None:
        for worker in self._fleet.up:
            worker.detach(record.id)
        record.out_of_pool(state, error)
        self._host.evict(record.id)

    def _fail(self, model: str, fault: Exception) -> None:
        self._post(ModelFailed(model, f"{type(fault).__name__}: {fault}"))

    # ---- workers --------------------------------------------------------------------------------

    def attach_all(self, worker: Worker) -> None:
        """Attach all models in the pool that the worker was not asked to attach yet."""
        for record in self._directory:
            if record.in_pool:
                self._attach(record, [worker])

    def _attach(self, record: ModelRecord, workers: Iterable[Worker]) -> None:
        hosted = record.hosted
        try:
            message = msg.Attach(hosted.spec, record.segment, hosted.config, hosted.dtype)
            for worker in workers:
                worker.attach(message)
        except Exception as fault:
            log.exception("attach of %s", record.id)
            self._fail(record.id, fault)

    def unusable(self, slice_id: str, message: msg.Unusable) -> ModelFailed | None:
        """Handle a worker's failure to attach a model. Return None if it was about earlier weights,
        which were evicted before the worker read the message to attach them."""
        if self._current(message.model, message.segment) is None:
            log.info("slice %s: %s has left the pool already", slice_id, message.segment)
            return None
        failed = ModelFailed(message.model, f"slice {slice_id}: {message.reason}")
        self.note(failed)
        return failed

    def attached(self, slice_id: str, message: msg.Attached) -> None:
        if (record := self._current(message.model, message.segment)) is not None:
            record.attached.add(slice_id)

    def measured(self, message: msg.Measured) -> None:
        if (record := self._directory.version(message.model)) is not None:
            record.prompt_token_s = message.prefill_token_s
            record.token_s = message.decode_step_s

    def _current(self, model: str, segment: str) -> ModelRecord | None:
        """Return the model's record if `segment` holds its present weights."""
        record = self._directory.version(model)
        return record if record is not None and record.segment == segment else None

    def lost(self, slice_id: str) -> None:
        """Note that nothing is attached or active on the slice any more."""
        for record in self._directory:
            record.slices.discard(slice_id)
            record.failing.pop(slice_id, None)
            record.attached.discard(slice_id)

    def nothing_active(self) -> None:
        """Note that no model is active on any slice; attached models stay attached."""
        for record in self._directory:
            record.slices.clear()
            record.failing.clear()
