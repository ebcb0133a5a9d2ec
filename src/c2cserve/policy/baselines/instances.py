"""Instances as presets have them: kept, streamed or loaded, sized in advance, kept for a while."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from c2cserve.core import events as ev
from c2cserve.core.actions import (
    Activate,
    BaselineClusterAction,
    ClusterAction,
    Preempt,
    ResizeKv,
)
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.policy.baselines.presets import Preset
from c2cserve.policy.baselines.slinfer.consolidation import Placer, footprint, weights_of
from c2cserve.policy.baselines.slinfer.memory import MemoryBooks, lowered
from c2cserve.policy.cluster.link_and_memory import stream_step_s
from c2cserve.policy.cluster.slice_load import Instance, Placement, SliceLoad
from c2cserve.policy.cluster.strategies import InstanceRules

Actions = Sequence[ClusterAction | BaselineClusterAction]


class PresetInstances(InstanceRules[BaselineClusterAction]):
    def __init__(self, preset: Preset, placer: Placer) -> None:
        self._preset = preset
        self._placer = placer
        self._idle: list[tuple[float, int, SliceLoad, Instance, int]] = []
        """A heap of instances without requests, by the time until which they are kept. Then a
        number that breaks ties, the slice, the instance, and its `Instance.used` at that time."""
        self._numbers = count()
        self._relieved: list[tuple[SliceLoad, Instance]] = []
        """Instances that requests have left since the last tick."""

    @property
    def wakeup(self) -> float | None:
        return self._idle[0][0] if self._idle else None

    def opened(self, slice_: Slice, load: SliceLoad) -> bool:
        if slice_.kind not in self._preset.kinds:
            return False
        sized = slice_.link_bytes_per_s > 0.0 and slice_.hbm_bytes > 0
        load.keeps = sized and (self._preset.keeps or self._preset.placing == "streams")
        if self._preset.placing == "slinfer":
            load.memory = MemoryBooks[Activate | ResizeKv](slice_.hbm_bytes or slice_.kv_bytes)
        return True

    # ---- its life -------------------------------------------------------------------------------

    def start(self, load: SliceLoad, spec: ModelSpec, placement: Placement) -> Actions:
        keep = placement.keep or not (self._preset.streams or load.is_cpu)
        streams = load.keeps and not keep
        step_s = stream_step_s(load, spec) if streams else 0.0
        instance = load.activate(spec, ready=not keep, streams=streams, stream_step_s=step_s)
        action = Activate(spec.id, load.slice.id, keep)
        if load.memory is None:
            if self._preset.placing == "limits" and not load.is_cpu:
                rest = load.slice.hbm_bytes - spec.weight_bytes
                return action, ResizeKv(spec.id, load.slice.id, max(0, rest))
            return (action,)
        instance.kv_bytes = placement.kv_bytes
        if load.memory.up(weights_of(load, spec) + placement.kv_bytes, action):
            return self._started(instance, action)
        instance.delayed = []
        return ()

    def _started(self, instance: Instance, action: Activate) -> Actions:
        delayed, instance.delayed = instance.delayed or (), None
        return action, ResizeKv(action.model, action.slice_id, instance.kv_bytes), *delayed

    def preempt(self, request_id: str, slice_id: str) -> Preempt:
        return Preempt(request_id, slice_id)

    def left(self, load: SliceLoad, instance: Instance) -> None:
        if load.memory is not None or not instance.jobs:
            self._relieved.append((load, instance))

    def ended(self, load: SliceLoad, instance: Instance) -> Actions:
        if load.memory is None:
            return ()
        size = footprint(load, instance) - load.memory.cancel(
            lambda action: action.model == instance.spec.id
        )
        load.memory.down(size)
        return self._freed(load, size + instance.shrinking)

    def expired(self, now: float) -> Sequence[tuple[SliceLoad, Instance]]:
        found: list[tuple[SliceLoad, Instance]] = []
        while self._idle and self._idle[0][0] <= now:
            _, _, load, instance, used = heappop(self._idle)
            if instance.used == used:
                found.append((load, instance))
        return found

    # ---- memory sized in advance ----------------------------------------------------------------

    def joined(self, load: SliceLoad, instance: Instance, placement: Placement) -> Actions:
        more = placement.kv_bytes - instance.kv_bytes
        if load.memory is None or more <= 0:
            return ()
        instance.kv_bytes = placement.kv_bytes
        action = ResizeKv(instance.spec.id, load.slice.id, placement.kv_bytes)
        return (action,) if load.memory.up(more, action) else ()

    def shrink(self, now: float) -> Sequence[ResizeKv]:
        actions: list[ResizeKv] = []
        for load, instance in self._relieved:
            if load.active.get(instance.spec.id) is not instance:
                continue
            actions += self._lower(load, instance)
            if not instance.jobs and self._preset.keep_alive_s < float("inf"):
                # A CPU reads weights from where they lie: there is nothing to keep.
                until_s = now + (0.0 if load.is_cpu else self._preset.keep_alive_s)
                entry = (until_s, next(self._numbers), load, instance, instance.used)
                heappush(self._idle, entry)
        self._relieved.clear()
        return actions

    def _lower(self, load: SliceLoad, instance: Instance) -> Sequence[ResizeKv]:
        if load.memory is None or instance.delayed is not None or instance.shrinking:
            return ()
        required = self._placer.required(instance)
        kv_bytes = lowered(instance.kv_bytes, required, self._preset.watermark)
        less = instance.kv_bytes - kv_bytes
        if less <= 0 or not instance.jobs:
            return ()
        instance.kv_bytes = instance.shrunk_to = kv_bytes
        instance.shrinking = less
        load.memory.down(less)
        return (ResizeKv(instance.spec.id, load.slice.id, kv_bytes),)

    def changed(
        self, load: SliceLoad, instance: Instance, event: ev.InstanceReady | ev.KvResized
    ) -> Actions:
        match event:
            case ev.InstanceReady():
                instance.ready = True
                return ()
            case ev.KvResized(_, _, kv_bytes):
                if kv_bytes != instance.shrunk_to or not instance.shrinking:
                    return ()
                less, instance.shrinking = instance.shrinking, 0
                return self._freed(load, less)

    def _freed(self, load: SliceLoad, size: int) -> Actions:
        assert load.memory is not None
        actions: list[ClusterAction | BaselineClusterAction] = []
        for action in load.memory.freed(size):
            if isinstance(action, Activate):
                actions += self._started(load.active[action.model], action)
            else:
                actions.append(action)
        return actions
