"""Placing as SLINFER does it (sections 5 to 8).

A request goes to an instance of its model that passes shadow validation
(`policy.baselines.slinfer.shadow`) and the memory check (`policy.baselines.slinfer.memory`). CPUs
go first, and the largest batch first, so that small batches run dry and free their memory (8 B,
reactive consolidation). If memory alone is in the way, a neighbour may have to leave: the smallest
batch that frees enough, smaller than its own. Each of its requests must be in time elsewhere (8 A,
proactive consolidation). Else a new instance is made, packed onto the slice that is busiest."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.baselines.presets import Preset
from c2cserve.policy.baselines.slinfer.memory import raised, required_bytes
from c2cserve.policy.baselines.slinfer.shadow import Prompt, Shadow, in_time, round_fits
from c2cserve.policy.cluster.slice_load import (
    Instance,
    PlacedRequest,
    Placement,
    SliceLoad,
    kv_token_bytes,
)


@dataclass(frozen=True, slots=True)
class Placer:
    """`mean_output`: of a model's requests so far, tokens."""

    preset: Preset
    mean_output: Callable[[str], float]

    def place(
        self, request: Request, spec: ModelSpec, loads: Sequence[SliceLoad], now: float
    ) -> Placement | None:
        return (
            self._join(request, spec, loads, now)
            or self._preempt(request, spec, loads, now)
            or self._start(request, spec, loads, now)
        )

    def _join(
        self, request: Request, spec: ModelSpec, loads: Iterable[SliceLoad], now: float
    ) -> Placement | None:
        for load in self._here(request, loads):
            kv_bytes = self._kv_bytes(request, spec, load)
            if kv_bytes is not None and self.computes(load, request, now):
                return Placement(load.slice.id, kv_bytes=kv_bytes)
        return None

    def _here(self, request: Request, loads: Iterable[SliceLoad]) -> list[SliceLoad]:
        """Slices with an instance of its model."""
        sign = -1 if self.preset.consolidate else 1
        here = [load for load in loads if request.model in load.active]
        batch = {load.slice.id: sign * len(load.active[request.model].jobs) for load in here}
        return sorted(here, key=lambda x: (not x.is_cpu, batch[x.slice.id], x.slice.id))

    def _start(
        self, request: Request, spec: ModelSpec, loads: Iterable[SliceLoad], now: float
    ) -> Placement | None:
        """A new instance: bin packing onto the fullest slice, an empty one last."""
        sign = -1 if self.preset.consolidate else 1
        able = [load for load in loads if self._may_start(request, load)]
        fill = {load.slice.id: self._fill(load) for load in able}
        able.sort(key=lambda x: (not x.is_cpu, not x.active, sign * fill[x.slice.id], x.slice.id))
        for load in able:
            kv_bytes = self._kv_bytes(request, spec, load)
            if kv_bytes is not None and self.computes(load, request, now):
                return Placement(load.slice.id, activate=True, kv_bytes=kv_bytes)
        return None

    def _may_start(self, request: Request, load: SliceLoad) -> bool:
        most = load.slice.max_active if self.preset.share else 1
        return request.model not in load.active and len(load.active) < most

    def _fill(self, load: SliceLoad) -> float:
        """How busy: by time on CPUs, which compute limits, by memory on GPUs."""
        if load.is_cpu or load.memory is None:
            return load.round_s()
        return float(load.memory.budget_bytes)

    # ---- preemption -----------------------------------------------------------------------------

    def _preempt(
        self, request: Request, spec: ModelSpec, loads: Sequence[SliceLoad], now: float
    ) -> Placement | None:
        if not self.preset.consolidate:
            return None
        for load in self._here(request, loads):
            victim = self._victim(request, spec, load, loads, now)
            if victim is not None:
                name, kv_bytes = victim
                return Placement(load.slice.id, preempt=name, kv_bytes=kv_bytes)
        return None

    def _victim(
        self, request: Request, spec: ModelSpec, load: SliceLoad, loads: Sequence[SliceLoad],
        now: float,
    ) -> tuple[str, int] | None:  # fmt: skip
        """The neighbour that has to leave, and the KV memory that the instance gets then."""
        batch = len(load.active[request.model].jobs)
        smaller = [
            (len(one.jobs), name) for name, one in load.active.items()
            if name != request.model and one.ready and one.delayed is None and len(one.jobs) < batch
        ]  # fmt: skip
        for _, name in sorted(smaller):
            one = load.active[name]
            kv_bytes = self._kv_bytes(request, spec, load, freed=footprint(load, one))
            if kv_bytes is None or not self.computes(load, request, now, without=name):
                continue
            if self._elsewhere(one, load, loads, now):
                return name, kv_bytes
        return None

    def _elsewhere(
        self, instance: Instance, load: SliceLoad, loads: Sequence[SliceLoad], now: float
    ) -> bool:
        """Would its requests be in time on other slices?"""
        others = [other for other in loads if other is not load]
        for job in instance.jobs.values():
            moved = resumed(job)
            if not (
                self._join(moved, instance.spec, others, now)
                or self._start(moved, instance.spec, others, now)
            ):
                return False
        return True

    # ---- time -----------------------------------------------------------------------------------

    def computes(self, load: SliceLoad, request: Request, now: float, without: str = "") -> bool:
        """Shadow validation of the request on the slice (6 C). A newcomer on an instance that has
        to load its weights first is not late for that: only the rounds after it count. A server has
        no profile before its first steps. So instances of unknown speed do not count, and requests
        for them are let in: what is never tried stays unknown."""
        if not load.times(request.model).measured:
            return True
        present = [
            (one, self._shadow(one)) for name, one in load.active.items()
            if name != without and one.times.measured
        ]  # fmt: skip
        joined = next((shadow for one, shadow in present if one.spec.id == request.model), None)
        loading = joined is None and not load.is_cpu
        mean = self.mean_output(request.model)
        target = joined or Shadow(load.times(request.model), mean_output=mean)
        due_s = PlacedRequest(request).due_s
        target.prompts.append(Prompt(due_s, request.prompt_len, request.slo.tpot_s, newcomer=True))
        fresh = [target] if joined is None else []
        shadows = [shadow for _, shadow in present] + fresh
        if not round_fits(shadows):
            return False
        ready = [shadow for one, shadow in present if one.ready] + ([] if loading else fresh)
        for shadow in ready:
            shadow.prompts.sort(key=lambda one: one.due_s)
        return in_time(ready, now)

    def _shadow(self, instance: Instance) -> Shadow:
        shadow = Shadow(instance.times, mean_output=self.mean_output(instance.spec.id))
        for job in instance.jobs.values():
            request, slo = job.request, job.request.slo
            if job.first_s is None:
                shadow.prompts.append(Prompt(job.due_s, request.prompt_len, slo.tpot_s))
                continue
            shadow.batch += 1
            shadow.tokens += request.prompt_len + job.out
            shadow.prompts_s += instance.times.prefill_s(request.prompt_len)
            shadow.due_s = min(shadow.due_s, job.due_s + slo.tpot_s * job.out)
            shadow.tpot_s = min(shadow.tpot_s, slo.tpot_s)
        return shadow

    # ---- memory ---------------------------------------------------------------------------------

    def required(self, instance: Instance, *more: Request) -> int:
        """Equation 2; nothing for an instance without requests. L_min is the longest context."""
        requests = [(job.request.prompt_len, job.out) for job in instance.jobs.values()]
        requests += [(request.prompt_len, 0) for request in more]
        if not requests:
            return 0
        mean = self.mean_output(instance.spec.id)
        least = min(instance.spec.max_context, _LEAST_TOKENS_MAX)
        return required_bytes(requests, mean, least, kv_token_bytes(instance.spec))

    def _kv_bytes(
        self, request: Request, spec: ModelSpec, load: SliceLoad, freed: int = 0
    ) -> int | None:
        """KV memory of the instance with one request more; None: there is not enough."""
        if load.memory is None:
            return 0
        present = load.active.get(request.model)
        instance = present or Instance(spec)
        free = load.memory.free_bytes + freed
        if present is None:
            free -= weights_of(load, spec)
        required = self.required(instance, request)
        return raised(instance.kv_bytes, required, self.preset.watermark, free)


_LEAST_TOKENS_MAX = 4096
"""The limit of L_min: longer contexts are rare among requests, whatever a model can do."""


def weights_of(load: SliceLoad, spec: ModelSpec) -> int:
    """Return what its weights take of the slice's memory. A slice of which only the KV's size is
    known reads them elsewhere."""
    return spec.weight_bytes if load.slice.hbm_bytes else 0


def footprint(load: SliceLoad, instance: Instance) -> int:
    return weights_of(load, instance.spec) + instance.kv_bytes


def resumed(job: PlacedRequest) -> Request:
    """What the request would be if it was taken from its instance now."""
    out = min(job.out, job.request.max_new_tokens - 1)
    request = job.request
    return replace(
        request,
        prompt_len=request.prompt_len + out,
        max_new_tokens=request.max_new_tokens - out,
        sent=request.sent + out,
    )
