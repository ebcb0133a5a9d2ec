"""Instances on their slices: started, filled and ended, with the books of it."""

from collections.abc import Iterable
from typing import Generic

from c2cserve.core import actions as act
from c2cserve.core import events as ev
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.cluster.quantify import Learned, StepTable, Times
from c2cserve.policy.cluster.slice_load import (
    Instance,
    Outputs,
    Placement,
    SliceLoad,
    expected_kv_bytes,
)
from c2cserve.policy.cluster.strategies import ExtraT, InstanceRules

Changed = ev.InstanceLoading | ev.InstanceReady | ev.KvResized


class Instances(Generic[ExtraT]):
    """The actions it takes are appended to `actions`."""

    def __init__(
        self,
        rules: InstanceRules[ExtraT],
        outputs: Outputs,
        actions: list[act.ClusterAction | ExtraT],
    ) -> None:
        self._rules = rules
        self._outputs = outputs
        self._actions = actions
        self.slices: dict[str, SliceLoad] = {}
        self.idle: dict[str, SliceLoad] = {}
        """Slices without requests,"""
        self.starting: dict[str, SliceLoad] = {}
        """and those with requests that have no first token."""
        self.where: dict[str, tuple[str, str]] = {}
        """Dispatched request -> model, slice."""
        self.recalled: dict[str, str] = {}
        """Request that is on its way back -> model."""
        self._began: list[Instance] = []
        """Those whose load has begun since the last tick: no clock is read in between."""
        self._profiles: dict[str, dict[str, Times]] = {}
        """Slice -> model -> times."""

    @property
    def wakeup(self) -> float | None:
        return self._rules.wakeup

    # ---- slices ---------------------------------------------------------------------------------

    def slice_up(self, slice_: Slice) -> None:
        load = SliceLoad(slice_, profiled=self._profile_of(slice_.id))
        if self._rules.opened(slice_, load):
            self.slices[slice_.id] = load
            self._sort(load)

    def slice_lost(self, slice_id: str, displaced: Iterable[Request]) -> list[str]:
        """Forget the slice. Return the model of each request that was there, or was on its way
        back."""
        load = self.slices.pop(slice_id, None)
        self.idle.pop(slice_id, None)
        self.starting.pop(slice_id, None)
        ids = [one.id for one in displaced]
        back = [self.recalled.pop(name) for name in ids if name in self.recalled]
        if load is None:
            return back
        lost = [request_id for one in load.active.values() for request_id in one.jobs]
        return back + [self.where.pop(request_id)[0] for request_id in lost]

    def _sort(self, load: SliceLoad) -> None:
        """Note whether the slice has requests, and some without a first token."""
        if load.requests:
            self.idle.pop(load.slice.id, None)
        else:
            self.idle[load.slice.id] = load
        if load.unstarted:
            self.starting[load.slice.id] = load
        else:
            self.starting.pop(load.slice.id, None)

    def apply(self, event: ev.InstanceEvent) -> None:
        match event:
            case ev.InstanceLoading() | ev.InstanceReady() | ev.KvResized():
                load = self.slices.get(event.slice_id)
                instance = None if load is None else load.active.get(event.model)
                if load is not None and instance is not None:
                    self._changed(load, instance, event)
            case ev.TokensSent():
                self._tokens_sent(event)
            case ev.StepTimes():
                self._measured(event)
            case ev.Profiled():
                self._profiled(event)

    def _changed(self, load: SliceLoad, instance: Instance, event: Changed) -> None:
        match event:
            case ev.InstanceLoading():
                self._began.append(instance)
                return
            case ev.InstanceReady(_, _, took_s):
                self._began = [one for one in self._began if one is not instance]
                load.loaded(instance, took_s)
            case _:
                pass
        self._actions += self._rules.changed(load, instance, event)

    def _tokens_sent(self, event: ev.TokensSent) -> None:
        for request_id, tokens in event.requests:
            if request_id in self.where:
                model, slice_id = self.where[request_id]
                job = self.slices[slice_id].active[model].jobs[request_id]
                job.out = tokens - job.request.sent

    def _profile_of(self, slice_id: str) -> dict[str, Times]:
        return self._profiles.setdefault(slice_id, {})

    def _profiled(self, event: ev.Profiled) -> None:
        table = StepTable(event.prefill, event.decode)
        for slice_id in event.slices:
            self._profile_of(slice_id).update(dict.fromkeys(event.models, table))

    def _measured(self, event: ev.StepTimes) -> None:
        """A profile takes precedence over what a slice measured."""
        load = self.slices.get(event.slice_id)
        if load is None or isinstance(load.times(event.model), StepTable):
            return
        load.believe(event.model, Learned(event.decode_step_s, event.prefill_token_s))

    # ---- requests -------------------------------------------------------------------------------

    def first_token(self, request_id: str, ttft_s: float) -> None:
        if request_id in self.where:
            model, slice_id = self.where[request_id]
            load = self.slices[slice_id]
            load.first_token(model, request_id, ttft_s)
            self._sort(load)

    def left(self, request_id: str) -> str | None:
        """The request is on no slice any more, nor on its way from one. Return its model."""
        if request_id not in self.where:
            return self.recalled.pop(request_id, None)
        model, slice_id = self.where.pop(request_id)
        load = self.slices[slice_id]
        load.remove(model, request_id)
        self._sort(load)
        self._rules.left(load, load.active[model])
        return model

    def send(
        self, request: Request, spec: ModelSpec, placement: Placement, now: float,
        *, kept: bool = False,
    ) -> None:  # fmt: skip
        load = self.slices[placement.slice_id]
        for unused in placement.deactivate:
            self.deactivate(load, unused)
        if placement.preempt is not None:
            self._preempt(load, placement.preempt)
        if placement.activate:
            self._actions += self._rules.start(load, spec, placement)
        else:
            self._actions += self._rules.joined(load, load.active[spec.id], placement)
        mean = self._outputs.mean(spec.id)
        load.add(request, expected_kv_bytes(request, spec, mean), kept=kept, now=now)
        self._sort(load)
        self.where[request.id] = (spec.id, load.slice.id)
        dispatch = act.Dispatch(request.id, load.slice.id)
        delayed = load.active[spec.id].delayed
        if delayed is None:
            self._actions.append(dispatch)
        else:
            delayed.append(dispatch)

    def undispatch(self, request_id: str) -> bool:
        """Take the request from its slice, or do not send it there if that was still to come.
        Return whether it has one. The caller says that it `left`."""
        if request_id not in self.where:
            return False
        model, slice_id = self.where[request_id]
        delayed = self.slices[slice_id].active[model].delayed
        if delayed is None:
            self._actions.append(act.Withdraw(request_id, slice_id))
        else:
            delayed.remove(act.Dispatch(request_id, slice_id))
        return True

    # ---- instances ------------------------------------------------------------------------------

    def deactivate(self, load: SliceLoad, model: str) -> bool:
        """End the instance of a model without requests. False if it is not active there."""
        instance = load.active.get(model)
        if instance is None or not load.deactivate(model):
            return False
        if instance.delayed is None:
            self._actions.append(act.Deactivate(model, load.slice.id))
        self._actions += self._rules.ended(load, instance)
        return True

    def _preempt(self, load: SliceLoad, model: str) -> None:
        for request_id in list(load.active[model].jobs):
            self._actions.append(self._rules.preempt(request_id, load.slice.id))
            self.left(request_id)
            self.recalled[request_id] = model
        self.deactivate(load, model)

    def refresh(self, now: float) -> bool:
        """Give memory back and end instances whose time is over. True: a slice has more room."""
        for instance in self._began:
            instance.loading_s = now
        self._began.clear()
        self._actions += self._rules.shrink(now)
        ended = False
        for load, instance in self._rules.expired(now):
            # Another instance of the model, or another life of the slice, is not meant.
            here = self.slices.get(load.slice.id) is load
            if here and load.active.get(instance.spec.id) is instance:
                ended |= self.deactivate(load, instance.spec.id)
        return ended
