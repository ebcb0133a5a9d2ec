"""A slice's world when it is simulated: the executor of `policy.slice`, with costs for kernels."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Protocol, cast

from c2cserve.core import events as ev
from c2cserve.core.actions import Drop, Move, RunStep, SetAlpha, SliceAction
from c2cserve.core.step import Step
from c2cserve.policy.residency import Residency
from c2cserve.policy.slice import SlicePolicy
from c2cserve.runtime.ports import Recorder
from c2cserve.sim.checks import BlockBook, SeqState
from c2cserve.sim.costs import Costs
from c2cserve.sim.hardware import Lane
from c2cserve.sim.jobs import Job
from c2cserve.sim.links import Flow, Network
from c2cserve.sim.loop import Loop, Turns
from c2cserve.sim.shapes import SimModel
from c2cserve.sim.timeline import Timeline

_REPORT_S = 1.0
"""How often a slice tells the controller its step times, as a live worker does."""


class Controller(Protocol):
    """What a slice tells the rest of the machine."""

    def tell(self, event: ev.ClusterEvent) -> None: ...

    def finished(self, job: Job) -> None: ...

    def truncated(self, job: Job) -> None: ...

    def dropped(self, job: Job) -> None: ...


@dataclass(frozen=True, slots=True)
class World:
    """What all slices of a machine share."""

    timeline: Timeline
    turns: Turns
    network: Network
    costs: Costs
    models: Mapping[str, SimModel]
    controller: Controller
    random: Random
    noise: float
    """Standard deviation of the logarithm of a step's time."""
    hybrid: bool
    """GEMMs are C2CServe's (`sim.costs`), with the alpha their policy asks for."""
    streams: bool
    """Weights stream in each step and are cached; else they are loaded before the first one."""


@dataclass(slots=True)
class Use:
    """What a slice did, seconds and counts."""

    busy_s: float = 0.0
    """A step ran."""
    used_s: float = 0.0
    """It had requests."""
    held_s: float = 0.0
    """It had instances."""
    steps: int = 0
    tokens: int = 0
    switches: int = 0
    loads: int = 0
    streamed_bytes: float = 0.0
    moved_bytes: int = 0
    """Of KV, between the slice and the host."""


class SimSlice:
    """`runtime.ports.Executor[SliceAction]`."""

    def __init__(
        self,
        lane: Lane,
        world: World,
        policy: SlicePolicy,
        record: Recorder[ev.SliceEvent, SliceAction],
    ) -> None:
        self.lane = lane
        self.loop: Loop[ev.SliceEvent, SliceAction] = Loop(policy, self, record)
        self.policy = policy
        self.seqs: dict[str, SeqState] = {}
        self.active: dict[str, SimModel] = {}
        self.use = Use()
        self.book = BlockBook(lane.slice)
        self._world = world
        cache_bytes = lane.slice.hbm_bytes - lane.slice.kv_bytes
        self._cache = Residency(max(0, cache_bytes)) if lane.h2d and world.streams else None
        self._resident: dict[str, set[int]] = {}
        """Layers in the cache."""
        self._line: deque[Step] = deque()
        """Steps to be computed, the first of them now."""
        self._started_s = 0.0
        self._flow: Flow | None = None
        self._alphas: dict[str, float] = {}
        self._memory_bytes = 0.0
        """What the running step moves in the slice's memory."""
        self._moved_before = 0.0
        """Bytes the slice's link had carried when it began."""
        self._loading: dict[str, float] = {}
        """Model whose weights are on their way -> since when."""
        self._paused: dict[str, int] = {}
        """Models that compute nothing for other reasons -> how many of those there are."""
        self._waiting: dict[str, list[Step]] = {}
        self._last_model = ""
        self._reported_s = 0.0
        self._used_since_s = self._held_since_s = 0.0
        self._dead = False

    # ---- what the controller tells it -----------------------------------------------------------

    def activate(self, model: SimModel) -> None:
        name = model.spec.id
        assert name not in self.active, f"{name} is active already on {self.lane.slice.id}"
        assert len(self.active) < self.lane.slice.max_active, "more models than the slice takes"
        if not self.active:
            self._held_since_s = self._world.timeline.now
        self.active[name] = model
        self._tell(ev.Activated(model.spec))
        if self.lane.h2d and not self._world.streams:
            self._load(model)

    def deactivate(self, name: str) -> None:
        del self.active[name]
        self._loading.pop(name, None)
        self._tell(ev.Deactivated(name))
        if not self.active:
            self.use.held_s += self._world.timeline.now - self._held_since_s

    def forget(self, name: str) -> None:
        """The model's weights leave the host's pool."""
        if self._cache is not None:
            self._cache.forget(name)
            self._resident.pop(name, None)

    def submit_job(self, job: Job) -> None:
        request = job.as_of_now()
        assert request.model in self.active, f"{request.model} is not active here"
        if not self.seqs:
            self._used_since_s = self._world.timeline.now
        spec = self.active[request.model].spec
        self.seqs[request.id] = SeqState(job, spec, request.prompt_len)
        self._tell(ev.Submitted(request))

    def withdraw(self, request_id: str) -> None:
        self._tell(ev.Withdrawn(request_id))

    def pause(self, name: str) -> None:
        """The model computes nothing until `resume`: its memory is being moved."""
        self._paused[name] = self._paused.get(name, 0) + 1

    def resume(self, name: str) -> None:
        self._paused[name] -= 1
        self._release(name)

    def lose(self) -> list[Job]:
        """The slice is gone; the jobs that were here."""
        self._dead = True
        if self._flow is not None:
            self._world.network.stop(self._flow)
        self.settle()
        return [seq.job for seq in self.seqs.values()]

    def settle(self) -> None:
        """Bring `use` up to now."""
        now = self._world.timeline.now
        if self.seqs:
            self.use.used_s += now - self._used_since_s
            self._used_since_s = now
        if self.active:
            self.use.held_s += now - self._held_since_s
            self._held_since_s = now
        if self._line:
            self.use.busy_s += now - self._started_s
            self._started_s = now

    def _tell(self, event: ev.SliceEvent) -> None:
        self._world.turns.tell(self.loop, event)

    # ---- loading, for systems that load (CPUs read weights where they lie) ----------------------

    def _load(self, model: SimModel) -> None:
        world, name, size = self._world, model.spec.id, model.spec.weight_bytes
        self.use.loads += 1
        now = self._loading[name] = world.timeline.now
        used = sum(other.spec.weight_bytes for other in self.active.values())
        assert used <= self.lane.slice.hbm_bytes, f"{self.lane.slice.id}: weights exceed its memory"
        done = partial(self._loaded, name, now)
        world.network.start(self.lane.h2d, size, self.lane.load_bytes_per_s, done)

    def _loaded(self, name: str, since_s: float) -> None:
        if self._dead or self._loading.get(name) != since_s:
            return
        del self._loading[name]
        took_s = self._world.timeline.now - since_s
        for seq in self.seqs.values():
            if seq.spec.id == name:
                dispatched_s = max(seq.job.dispatched_s, since_s)
                seq.job.grace_s += self._world.timeline.now - dispatched_s
        self._world.controller.tell(ev.InstanceReady(name, self.lane.slice.id, took_s))
        self._release(name)

    def _blocked(self, name: str) -> bool:
        return name in self._loading or self._paused.get(name, 0) > 0

    def _release(self, name: str) -> None:
        if not self._blocked(name):
            for step in self._waiting.pop(name, ()):
                self._enqueue(step)

    # ---- steps ----------------------------------------------------------------------------------

    def submit(self, action: SliceAction) -> None:
        if isinstance(action, RunStep):
            step = action.step
            if self._blocked(step.model):
                self._waiting.setdefault(step.model, []).append(step)
                self._tell(ev.StepParked(step.id))
            else:
                self._enqueue(step)
        elif isinstance(action, Drop):
            seq = self.seqs[action.request_id]
            self.book.release(seq)
            if action.requeued:
                seq.job.preempted += 1
            else:
                self._leave(seq)
                self._world.controller.dropped(seq.job)
        elif isinstance(action, Move):
            self._move(action)
        elif isinstance(action, SetAlpha):
            self._alphas[action.model] = action.alpha
        else:
            seq = self.seqs[action.request_id]
            self.book.release(seq)
            self._leave(seq)
            self._world.controller.truncated(seq.job)

    def _move(self, move: Move) -> None:
        """KV takes the same links as weights, the other way out."""
        seq = self.seqs[move.request_id]
        self.book.move(seq, move)
        size = len(move.blocks) * seq.spec.kv_block_bytes
        route = self.lane.h2d if move.direction == "in" else self.lane.d2h
        done = partial(self._moved, seq, move)
        self.use.moved_bytes += size
        if size and route:
            self._world.network.start(route, size, inf, done)
        else:
            self._world.timeline.at(self._world.timeline.now, done)

    def _moved(self, seq: SeqState, move: Move) -> None:
        if not self._dead:
            self.book.moved(seq)
            self._tell(ev.MoveDone(move.request_id, move.direction))

    def _enqueue(self, step: Step) -> None:
        self._line.append(step)
        if len(self._line) == 1:
            self._start()

    def _start(self) -> None:
        step, world, lane = self._line[0], self._world, self.lane
        for part in step.seqs:
            seq = self.seqs[part.request_id]
            self.book.begin(seq, part)
            assert part.start == seq.computed, f"{part.request_id}: a token is skipped or repeated"
            assert part.emits == (part.start + part.tokens == seq.length)
        model = world.models[step.model]
        now = self._started_s = world.timeline.now
        if step.model != self._last_model:
            self.use.switches += bool(self._last_model)
            self._last_model = step.model
        kept = 1.0 if self._cache is None else self._keep(self._cache, model, now)
        alpha = self._alphas.get(step.model, 0.0) if world.hybrid else None
        cost = world.costs.step(step, model, lane, kept, alpha)
        floor_s = cost.floor_s
        if world.noise:
            floor_s *= world.random.lognormvariate(0.0, world.noise)
        streamed = cost.link_bytes if lane.h2d and world.streams else 0.0
        self.use.streamed_bytes += streamed
        if alpha is not None and lane.h2d:
            self._memory_bytes = cost.memory_bytes
            self._moved_before = world.network.moved_bytes(lane.h2d[0])
        if lane.compute:
            self._flow = world.network.start((lane.compute,), floor_s, 1.0, self._done)
        elif streamed > 0:
            self._flow = world.network.start(lane.h2d, streamed, streamed / floor_s, self._done)
        else:
            world.timeline.at(now + floor_s, self._done)

    def _keep(self, cache: Residency, model: SimModel, now: float) -> float:
        """The share of the weights that need not come over the link; what comes is kept for the
        next steps where there is room."""
        spec = model.spec
        cache.used(spec.id, now, spec.priority)
        layers = self._resident.setdefault(spec.id, set())
        kept = len(layers) / spec.layers
        if kept < 1.0:
            size = spec.weight_bytes // spec.layers
            for layer in range(spec.layers):
                if layer not in layers:
                    gone = cache.admit(spec.id, (spec.id, layer), size, now)
                    if gone is None:
                        break
                    for name, lost in cast("list[tuple[str, int]]", gone):
                        self._resident[name].remove(lost)
                    layers.add(layer)
        return kept

    def _done(self) -> None:
        if self._dead:
            return
        world, now = self._world, self._world.timeline.now
        self._flow = None
        step = self._line.popleft()
        took_s = now - self._started_s
        use = self.use
        use.busy_s += took_s
        use.steps += 1
        outcomes: list[ev.SeqOutcome] = []
        for part in step.seqs:
            seq = self.seqs[part.request_id]
            seq.computed += part.tokens
            use.tokens += part.tokens
            if not part.emits:
                continue
            job = seq.job
            seq.length += 1
            job.draw(1, now)
            if job.drawn == 1:
                world.controller.tell(ev.FirstToken(part.request_id, job.ttft_s))
            finished = job.drawn >= job.owed
            outcomes.append(ev.SeqOutcome(part.request_id, 1, finished))
            if finished:
                self.book.release(seq)
                self._leave(seq)
                world.controller.finished(job)
        self._tell(ev.StepDone(step.id, tuple(outcomes), took_s))
        if world.hybrid and self.lane.h2d:
            self._measure_gemms(step, took_s)
        if now - self._reported_s >= _REPORT_S:
            self._report(now)
        if self._line:
            self._start()

    def _measure_gemms(self, step: Step, took_s: float) -> None:
        network, link = self._world.network, self.lane.h2d[0]
        moved = network.moved_bytes(link) - self._moved_before
        memory = self._memory_bytes / (took_s * self.lane.hbm_bytes_per_s)
        use = moved / (took_s * network.links[link].bytes_per_s)
        self._tell(ev.GemmsMeasured(step.model, took_s, min(1.0, memory), min(1.0, use)))

    def _leave(self, seq: SeqState) -> None:
        del self.seqs[seq.job.request.id]
        if not self.seqs:
            self.use.used_s += self._world.timeline.now - self._used_since_s

    def _report(self, now: float) -> None:
        self._reported_s = now
        for name, time in self.policy.step_times().items():
            if time.decode_s:
                self._world.controller.tell(
                    ev.StepTimes(self.lane.slice.id, name, time.decode_s, time.prefill_token_s)
                )
