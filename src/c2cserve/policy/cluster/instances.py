"""Instances on their slices: started, filled, sized, kept alive and ended, with the books of it."""

from bisect import insort

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.baselines.slinfer.consolidation import Placer, footprint
from c2cserve.policy.baselines.slinfer.memory import MemoryBooks, lowered
from c2cserve.policy.cluster.quantify import Learned, StepTable, Times
from c2cserve.policy.cluster.slice_load import Instance, Placement, SliceLoad, expected_kv_bytes
from c2cserve.policy.presets import Preset


class Instances:
    """What it does is appended to `actions`."""

    def __init__(self, preset: Preset, placer: Placer, actions: list[act.ClusterAction]) -> None:
        self._preset = preset
        self._placer = placer
        self._actions = actions
        self.slices: dict[str, SliceLoad] = {}
        self.where: dict[str, tuple[str, str]] = {}
        """Dispatched request -> model, slice."""
        self.recalled: dict[str, str] = {}
        """Request that is on its way back -> model."""
        self._profiles: dict[str, dict[str, Times]] = {}
        """Slice -> model -> times."""
        self._idle: list[tuple[float, str, str, int]] = []
        """Instances without requests, by until when they are kept; and `Instance.used` then."""
        self._relieved: list[tuple[SliceLoad, Instance]] = []
        """Instances that requests have left since the last tick."""

    @property
    def wakeup(self) -> float | None:
        return self._idle[0][0] if self._idle else None

    # ---- slices ---------------------------------------------------------------------------------

    def slice_up(self, slice_: Slice) -> None:
        if slice_.kind not in self._preset.kinds:
            return
        load = self.slices[slice_.id] = SliceLoad(slice_, profiled=self._profile_of(slice_.id))
        known = slice_.link_bytes_per_s > 0.0 and slice_.hbm_bytes > 0
        load.keeps = self._preset.keeps and known
        if self._preset.placing == "slinfer":
            load.memory = MemoryBooks(slice_.hbm_bytes or slice_.kv_bytes)

    def slice_lost(self, slice_id: str) -> list[str]:
        """The model of each request that was there."""
        load = self.slices.pop(slice_id, None)
        if load is None:
            return []
        lost = [request_id for one in load.active.values() for request_id in one.jobs]
        return [self.where.pop(request_id)[0] for request_id in lost]

    def apply(self, event: ev.StepTimes | ev.Profiled | ev.InstanceReady | ev.KvResized) -> None:
        match event:
            case ev.StepTimes():
                self.measured(event)
            case ev.Profiled():
                self.profiled(event)
            case ev.InstanceReady():
                self.ready(event)
            case ev.KvResized():
                self.resized(event)

    def _profile_of(self, slice_id: str) -> dict[str, Times]:
        return self._profiles.setdefault(slice_id, {})

    def profiled(self, event: ev.Profiled) -> None:
        table = StepTable(event.prefill, event.decode)
        for slice_id in event.slices:
            self._profile_of(slice_id).update(dict.fromkeys(event.models, table))

    def measured(self, event: ev.StepTimes) -> None:
        """Believed only of what nobody has profiled."""
        load = self.slices.get(event.slice_id)
        if load is None or isinstance(load.times(event.model), StepTable):
            return
        load.believe(event.model, Learned(event.decode_step_s, event.prefill_token_s))

    # ---- requests -------------------------------------------------------------------------------

    def first_token(self, request_id: str, ttft_s: float) -> None:
        if request_id in self.where:
            model, slice_id = self.where[request_id]
            self.slices[slice_id].first_token(model, request_id, ttft_s)

    def left(self, request_id: str) -> str | None:
        """It is on no slice any more, nor on its way from one; the model it was of."""
        if request_id not in self.where:
            return self.recalled.pop(request_id, None)
        model, slice_id = self.where.pop(request_id)
        load = self.slices[slice_id]
        load.remove(model, request_id)
        instance = load.active[model]
        if load.memory is not None or not instance.jobs:
            self._relieved.append((load, instance))
        return model

    def send(
        self, request: Request, spec: ModelSpec, placement: Placement, *, displaced: bool = False
    ) -> None:
        load = self.slices[placement.slice_id]
        for leaving in placement.deactivate:
            self.deactivate(load, leaving)
        if placement.preempt is not None:
            self._preempt(load, placement.preempt)
        if placement.activate:
            self._activate(load, spec, placement)
        elif load.memory is not None:
            self._resize(load, load.active[spec.id], placement.kv_bytes)
        mean = self._placer.mean_output(spec.id)
        load.add(request, expected_kv_bytes(request, spec, mean), displaced=displaced)
        self.where[request.id] = (spec.id, load.slice.id)
        dispatch = act.Dispatch(request.id, load.slice.id)
        held = load.active[spec.id].held
        (self._actions if held is None else held).append(dispatch)

    def undispatch(self, request_id: str) -> None:
        """Take it from its slice, or do not send it there if that was still to come. The caller
        says that it `left`."""
        model, slice_id = self.where[request_id]
        held = self.slices[slice_id].active[model].held
        if held is None:
            self._actions.append(act.Withdraw(request_id, slice_id))
        else:
            held.remove(act.Dispatch(request_id, slice_id))

    # ---- instances ------------------------------------------------------------------------------

    def _activate(self, load: SliceLoad, spec: ModelSpec, placement: Placement) -> None:
        keep = placement.keep or not (self._preset.streams or load.is_cpu)
        instance = load.activate(spec, ready=not keep, streams=load.keeps and not keep)
        action = act.Activate(spec.id, load.slice.id, keep)
        if load.memory is None:
            self._actions.append(action)
            if self._preset.placing == "limits" and not load.is_cpu:
                rest = load.slice.hbm_bytes - spec.weight_bytes
                self._actions.append(act.ResizeKv(spec.id, load.slice.id, max(0, rest)))
            return
        instance.kv_bytes = placement.kv_bytes
        if load.memory.up(spec.weight_bytes + placement.kv_bytes, action):
            self._started(load, instance, action)
        else:
            instance.held = []

    def _started(self, load: SliceLoad, instance: Instance, action: act.Activate) -> None:
        self._actions.append(action)
        self._actions.append(act.ResizeKv(action.model, action.slice_id, instance.kv_bytes))
        self._actions.extend(instance.held or ())
        instance.held = None

    def deactivate(self, load: SliceLoad, model: str) -> bool:
        """A model without requests; False if it is not active there."""
        instance = load.active.get(model)
        if instance is None or not load.deactivate(model):
            return False
        if instance.held is None:
            self._actions.append(act.Deactivate(model, load.slice.id))
        if load.memory is not None:
            waiting = load.memory.cancel(lambda action: action.model == model)
            size = footprint(instance) - waiting
            load.memory.down(size)
            self._freed(load, size + instance.shrinking)
        return True

    def _preempt(self, load: SliceLoad, model: str) -> None:
        for request_id in list(load.active[model].jobs):
            self._actions.append(act.Recall(request_id, load.slice.id))
            self.left(request_id)
            self.recalled[request_id] = model
        self.deactivate(load, model)

    def ready(self, event: ev.InstanceReady) -> None:
        load = self.slices.get(event.slice_id)
        if load is not None and event.model in load.active:
            load.active[event.model].ready = True

    def settle(self, now: float) -> bool:
        """See to instances that have less to do: give memory back, keep them alive for a while,
        end those whose time is over. True: there is more room on some slice."""
        for load, instance in self._relieved:
            if load.active.get(instance.spec.id) is not instance:
                continue
            if load.memory is not None:
                self._lower(load, instance, now)
            if not instance.jobs and self._preset.keep_alive_s < float("inf"):
                # A CPU reads weights from where they lie: there is nothing to keep.
                until_s = now + (0.0 if load.is_cpu else self._preset.keep_alive_s)
                insort(self._idle, (until_s, load.slice.id, instance.spec.id, instance.used))
        self._relieved.clear()
        ended = False
        while self._idle and self._idle[0][0] <= now:
            _, slice_id, model, used = self._idle.pop(0)
            load = self.slices.get(slice_id)
            instance = None if load is None else load.active.get(model)
            if load is not None and instance is not None and instance.used == used:
                ended |= self.deactivate(load, model)
        return ended

    # ---- memory ---------------------------------------------------------------------------------

    def _resize(self, load: SliceLoad, instance: Instance, kv_bytes: int) -> None:
        more = kv_bytes - instance.kv_bytes
        if more <= 0:
            return
        assert load.memory is not None
        instance.kv_bytes = kv_bytes
        action = act.ResizeKv(instance.spec.id, load.slice.id, kv_bytes)
        if load.memory.up(more, action):
            self._actions.append(action)

    def _lower(self, load: SliceLoad, instance: Instance, now: float) -> None:
        assert load.memory is not None
        if instance.held is not None or instance.shrinking:
            return
        required = self._placer.required(instance, now, load.round_s())
        kv_bytes = lowered(instance.kv_bytes, required, self._preset.watermark)
        less = instance.kv_bytes - kv_bytes
        if less > 0 and instance.jobs:
            instance.kv_bytes = instance.shrunk_to = kv_bytes
            instance.shrinking = less
            load.memory.down(less)
            self._actions.append(act.ResizeKv(instance.spec.id, load.slice.id, kv_bytes))

    def resized(self, event: ev.KvResized) -> None:
        load = self.slices.get(event.slice_id)
        instance = None if load is None else load.active.get(event.model)
        if load is None or instance is None or event.kv_bytes != instance.shrunk_to:
            return
        if instance.shrinking:
            less, instance.shrinking = instance.shrinking, 0
            self._freed(load, less)

    def _freed(self, load: SliceLoad, size: int) -> None:
        assert load.memory is not None
        for action in load.memory.freed(size):
            match action:
                case act.Activate(model):
                    self._started(load, load.active[model], action)
                case _:
                    self._actions.append(action)
