"""What the controller's policies keep of a slice: its instances, their requests, and what is
believed about their speed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from c2cserve.core.actions import Activate, Dispatch, ResizeKv
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Request
from c2cserve.core.value import value
from c2cserve.policy.cluster.quantify import UNKNOWN, Times

_NEVER_S = float("inf")
_BY_NUMBER = attrgetter("number")
_OUTPUT_WEIGHT = 0.05
_OUTPUT_UNKNOWN = 256.0
"""Tokens expected of a model's first requests."""


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request dispatched to an instance."""

    request: Request
    kv_bytes: float = 0.0
    """What it is expected to take of the slice's memory in the end."""
    sent_s: float = 0.0
    excused_s: float = 0.0
    """How long its model was loaded while it waited, where its targets excuse that."""
    first_s: float | None = None
    """When it got its first token here."""
    kept: bool = False
    """It is not refused any more, however late it is."""
    out: int = 0
    """Tokens it has drawn here, as far as the controller was told (`events.TokensSent`)."""

    @property
    def due_s(self) -> float:
        """When the first token it gets here is due (equation 1 of SLINFER with those sent
        before)."""
        request = self.request
        return request.first_token_due_s + self.excused_s + request.slo.tpot_s * request.sent


@dataclass(slots=True, eq=False)
class Instance:
    """A model active on a slice."""

    spec: ModelSpec
    number: int = 0
    """Counts the instances of its slice."""
    jobs: dict[str, PlacedRequest] = field(default_factory=dict[str, PlacedRequest])
    pending: dict[str, PlacedRequest] = field(default_factory=dict[str, PlacedRequest])
    """Requests without a first token."""
    prompt_tokens: int = 0
    """Prompt tokens of all its requests."""
    tpot_s: float = _NEVER_S
    """The strictest of its requests' targets since it was last empty."""
    times: Times = UNKNOWN
    ready: bool = True
    """Its weights need not be loaded first, or they are."""
    loading_s: float | None = None
    """Since when its weights are being loaded. None: they are not."""
    streams: bool = False
    """Its weights cross the slice's link with each step, and so take none of its memory."""
    stream_step_s: float = 0.0
    """The least time of a decode step for that."""
    kv_bytes: int = 0
    """Memory it has for KV, where that is sized in advance."""
    shrinking: int = 0
    """Bytes it is giving back; it has, when it is told of being resized to `shrunk_to`."""
    shrunk_to: int = 0
    delayed: list[Dispatch] | None = None
    """The instance waits for memory to be started: what is dispatched to it then."""
    used: int = 0
    """Requests it ever had. Tells one idle time from the next."""
    _step_s: float | None = None

    def changed(self) -> None:
        self._step_s = None

    def due_s(self, job: PlacedRequest, now: float) -> float:
        """Return when a request's first token is due, if a load that is under way ends now."""
        if self.loading_s is None or not job.request.excuses_loads:
            return job.due_s
        return job.due_s + max(0.0, now - max(self.loading_s, job.sent_s))

    def step_s(self) -> float:
        """Return the seconds of its decode step, which is kept until something changes."""
        if self._step_s is None:
            self._step_s = max(self.decode_s(), self.stream_step_s)
        return self._step_s

    def decode_s(self, more: int = 0, more_tokens: int = 0) -> float:
        """Return the seconds of a decode step with so many more requests."""
        batch = len(self.jobs) + more
        tokens = self.prompt_tokens + more_tokens
        return self.times.decode_s(batch, tokens / batch) if batch else 0.0


@value
class Work:
    """What there is to do on a slice."""

    round_s: float
    """One decode step of every instance."""
    tpot_s: float
    """The strictest target."""
    prompts: tuple[tuple[float, float], ...]
    """When the first token of each prompt is due, and its seconds; by due time."""


class InstanceMemory(Protocol):
    """Memory of a slice on which each instance has weights and KV of its own, sized in advance
    (`policy.baselines.slinfer.memory.MemoryBooks`)."""

    budget_bytes: int

    @property
    def free_bytes(self) -> int: ...

    def up(self, size: int, operation: Activate | ResizeKv) -> bool: ...

    def cancel(self, unwanted: Callable[[Activate | ResizeKv], bool]) -> int: ...

    def down(self, size: int) -> None: ...

    def freed(self, size: int) -> list[Activate | ResizeKv]: ...


@dataclass(slots=True, eq=False)
class SliceLoad:
    slice: Slice
    active: dict[str, Instance] = field(default_factory=dict[str, Instance])
    requests: int = 0
    unstarted: int = 0
    """Those without a first token."""
    tenants: dict[str, int] = field(default_factory=dict[str, int])
    """Requests of each tenant that has some here."""
    unused: int = 0
    """Active models without requests."""
    profiled: dict[str, Times] = field(default_factory=dict[str, Times])
    weight_bytes: int = 0
    """Weights of its active models, but for those that stream."""
    kv_bytes: float = 0.0
    """Expected of all its requests."""
    keeps: bool = False
    """Weights stream or are kept, by model (`policy.cluster.link_and_memory`)."""
    memory: InstanceMemory | None = None
    """Where every instance has weights and KV of its own."""
    most_requests: int = field(init=False)
    """What waits at the controller can still go to any slice, so this one gets no more than keeps
    it busy."""
    _work: Work | None = None
    _busy: list[Instance] = field(default_factory=list[Instance])
    """Active instances with requests. Hundreds may have none."""
    _instances: int = 0
    """How many it ever had."""

    def __post_init__(self) -> None:
        self.most_requests = 2 * self.slice.max_batch

    @property
    def instance_limit(self) -> int:
        """A full batch and what follows at once; the rest of the slice is for other models."""
        return self.slice.max_batch + self.slice.max_batch // 4

    def owes(self, tenant: str) -> bool:
        """Whether the tenant has less than its share of this slice, and others have some of it. Its
        request need not wait for theirs to end: the slice serves it first
        (`policy.slice_shares`)."""
        own = self.tenants.get(tenant, 0)
        tenants = len(self.tenants) + (own == 0)
        return tenants > 1 and (own + 1) * tenants <= self.most_requests

    @property
    def is_cpu(self) -> bool:
        return self.slice.kind == "cpu"

    def excused_s(self, request: Request) -> float:
        """Return how much of its wait for a first token does not count."""
        instance = self.active.get(request.model)
        job = None if instance is None else instance.jobs.get(request.id)
        return 0.0 if job is None else job.excused_s

    def busy(self) -> list[Instance]:
        """Return the instances with requests, in the order of their activation."""
        return self._busy

    def resident_bytes(self) -> int:
        """Return the weights of instances with requests that do not stream. With weight swapping,
        models without requests take no room."""
        size = 0
        for one in self._busy:
            size += 0 if one.streams else one.spec.weight_bytes
        return size

    def work(self) -> "Work":
        """Return the work of all instances; it is kept until something changes."""
        if self._work is None:
            round_s, tpot_s = 0.0, _NEVER_S
            prompts: list[tuple[float, float]] = []
            for one in self._busy:
                round_s += one.step_s()
                if one.tpot_s < tpot_s:
                    tpot_s = one.tpot_s
                for job in one.pending.values():
                    prompts.append((job.due_s, one.times.prefill_s(job.request.prompt_len)))
            self._work = Work(round_s, tpot_s, tuple(sorted(prompts)))
        return self._work

    def round_s(self) -> float:
        """Return the seconds of one decode step of every instance."""
        return self.work().round_s

    def times(self, model: str) -> Times:
        if model in self.active:
            return self.active[model].times
        return self.profiled.get(model, UNKNOWN)

    def activate(
        self, spec: ModelSpec, *, ready: bool = True, streams: bool = False,
        stream_step_s: float = 0.0,
    ) -> Instance:  # fmt: skip
        times = self.profiled.get(spec.id, UNKNOWN)
        self._instances += 1
        instance = Instance(
            spec, self._instances, times=times, ready=ready, streams=streams,
            stream_step_s=stream_step_s,
        )  # fmt: skip
        self.active[spec.id] = instance
        self.unused += 1
        self.weight_bytes += 0 if streams else spec.weight_bytes
        return instance

    def deactivate(self, model: str) -> bool:
        """Deactivate a model without requests. Return whether it was active here."""
        if model not in self.active:
            return False
        instance = self.active.pop(model)
        assert not instance.jobs
        self.unused -= 1
        self.weight_bytes -= 0 if instance.streams else instance.spec.weight_bytes
        return True

    def believe(self, model: str, times: Times) -> None:
        self._work = None
        self.profiled[model] = times
        if model in self.active:
            self.active[model].times = times
            self.active[model].changed()

    def loaded(self, instance: Instance, took_s: float) -> None:
        """Note the end of a load."""
        since_s, instance.loading_s = instance.loading_s, None
        if since_s is None:
            return
        self._work = None
        for job in instance.pending.values():
            if job.request.excuses_loads:
                job.excused_s += min(took_s, max(0.0, since_s + took_s - job.sent_s))

    def add(
        self, request: Request, kv_bytes: float = 0.0, *, kept: bool = False,
        now: float = 0.0,
    ) -> None:  # fmt: skip
        self._work = None
        instance = self.active[request.model]
        instance.changed()
        if not instance.jobs:
            self.unused -= 1
            self._busy.append(instance)
            self._busy.sort(key=_BY_NUMBER)
        job = PlacedRequest(request, kv_bytes, now, kept=kept)
        instance.jobs[request.id] = instance.pending[request.id] = job
        self.kv_bytes += kv_bytes
        instance.used += 1
        instance.prompt_tokens += request.prompt_len
        instance.tpot_s = min(instance.tpot_s, request.slo.tpot_s)
        self.requests += 1
        self.unstarted += 1
        self.tenants[request.tenant] = self.tenants.get(request.tenant, 0) + 1

    def first_token(self, model: str, request_id: str, ttft_s: float) -> None:
        instance = self.active[model]
        job = instance.jobs[request_id]
        if job.first_s is None:
            self._work = None
            instance.changed()
            del instance.pending[request_id]
            self.unstarted -= 1
            job.first_s = job.request.arrival_s + ttft_s

    def remove(self, model: str, request_id: str) -> None:
        self.first_token(model, request_id, 0.0)
        instance = self.active[model]
        self._work = None
        instance.changed()
        job = instance.jobs.pop(request_id)
        instance.prompt_tokens -= job.request.prompt_len
        self.kv_bytes = self.kv_bytes - job.kv_bytes if self.requests > 1 else 0.0
        self.requests -= 1
        left = self.tenants[job.request.tenant] - 1
        if left:
            self.tenants[job.request.tenant] = left
        else:
            del self.tenants[job.request.tenant]
        if not instance.jobs:
            instance.tpot_s = _NEVER_S
            self.unused += 1
            self._busy.remove(instance)


class Outputs:
    """How long a model's answers were lately, tokens."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def learn(self, model: str, tokens: int) -> None:
        mean = self.mean(model) if model in self._means else float(tokens)
        self._means[model] = mean + _OUTPUT_WEIGHT * (tokens - mean)

    def mean(self, model: str) -> float:
        return self._means.get(model, _OUTPUT_UNKNOWN)


def expected_kv_bytes(request: Request, spec: ModelSpec, mean_output: float) -> float:
    """Return the KV of the request at its end, if its answer is as long as its model's on
    average."""
    tokens = request.prompt_len + min(mean_output, request.max_new_tokens)
    return tokens * kv_token_bytes(spec)


def kv_token_bytes(spec: ModelSpec) -> float:
    return spec.kv_block_bytes / BLOCK_TOKENS


@value
class Placement:
    slice_id: str
    activate: bool = False
    keep: bool = False
    """The instance's weights are loaded and kept, in place of streaming."""
    deactivate: tuple[str, ...] = ()
    """Models without requests that leave the slice for it."""
    preempt: str | None = None
    """A model whose requests are recalled, and which leaves the slice for it."""
    kv_bytes: int = 0
    """What the instance's KV memory is raised to, where that is sized in advance."""
