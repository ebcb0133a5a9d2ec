"""A simulated slice: the executor of `policy.slice`, with costs in place of kernels."""

from dataclasses import replace
from functools import partial

from c2cserve.core import events as ev
from c2cserve.core.actions import (
    BaselineSliceAction,
    BringPrefix,
    Drop,
    DropPrefix,
    Fetch,
    Move,
    Release,
    Return,
    RunStep,
    SavePrefix,
    SetAlpha,
    SliceAction,
    Truncate,
)
from c2cserve.core.step import LANES, Lane, Step
from c2cserve.runtime.ports import Executor, Recorder
from c2cserve.sim.policies.build import SimulatedSlicePolicy
from c2cserve.sim.world.checks import BlockBook, PrefixBook, SeqState
from c2cserve.sim.world.compute import Compute
from c2cserve.sim.world.context import ComputingSlice, SimulationContext, SliceUse
from c2cserve.sim.world.copy_engine import CopyEngine
from c2cserve.sim.world.hardware import SimulatedSlice
from c2cserve.sim.world.host_thread import HostThread
from c2cserve.sim.world.links import PathsLoad
from c2cserve.sim.world.loop import PolicyLoop
from c2cserve.sim.world.requests import TrackedRequest
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.weight_cache import ArrivingSteps, WeightCache

_BESIDE_RESIDENT = 2.0
"""How many times as long a step's arithmetic takes in the streaming lane while a resident step is
under way, whose CTAs go first. (Assumed, not measured.)"""

_REPORT_S = 1.0
"""How often a live worker tells the controller what steps took."""


class SliceSimulation(Executor[SliceAction | BaselineSliceAction], ComputingSlice):
    """The executor of all of a slice's actions."""

    def __init__(
        self,
        simulated: SimulatedSlice,
        context: SimulationContext,
        policy: SimulatedSlicePolicy,
        record: Recorder[ev.SliceEvent, SliceAction | BaselineSliceAction],
        *,
        chained: bool = False,
        reports: bool = False,
    ) -> None:
        """`chained`: a request's next step may be decided before its last one has ended.
        `reports`: the controller is told what steps took, as a live worker tells it."""
        self.simulated = simulated
        self.loop: PolicyLoop[ev.SliceEvent, SliceAction | BaselineSliceAction] = PolicyLoop(
            policy, self, record
        )
        self.policy = policy
        self.seqs: dict[str, SeqState] = {}
        self.active: dict[str, SimModel] = {}
        self.book = BlockBook(simulated.slice)
        self.prefixes = PrefixBook(simulated.slice)
        self._context = context
        self._chained, self._reports = chained, reports
        self._reported_s = 0.0
        self._cache: WeightCache | None = None
        if simulated.h2d:
            self._cache = WeightCache(max(0, simulated.slice.hbm_bytes - simulated.slice.kv_bytes))
        self._host = None if simulated.host is None else HostThread(simulated.host)
        self.use = SliceUse()
        """Counters of all lanes together."""
        self._lanes: dict[Lane, Compute] = {
            lane: Compute(
                simulated, context, self.seqs, self.book, self._cache, self.use, self, lane
            )
            for lane in LANES[: simulated.slice.lanes]
        }  # fmt: skip
        self._in = CopyEngine(context.timeline, context.network, simulated.h2d)
        self._out = CopyEngine(context.timeline, context.network, simulated.d2h)
        self._loading: dict[str, tuple[float, PathsLoad]] = {}
        """Model whose weights are loading -> since when, and over which flow."""
        self._paused: dict[str, int] = {}
        """Models that compute nothing for other reasons -> the number of reasons."""
        self._waiting: dict[str, list[RunStep]] = {}
        self._arriving = ArrivingSteps()
        self._used_since_s = self._held_since_s = 0.0
        self._dead = False

    # ---- orders of the controller ---------------------------------------------------------------

    def activate(self, model: SimModel, *, keep: bool) -> None:
        name = model.spec.id
        assert name not in self.active, f"{name} is active already on {self.simulated.slice.id}"
        assert len(self.active) < self.simulated.slice.max_active, (
            "more models than the slice takes"
        )
        if not self.active:
            self._held_since_s = self._context.timeline.now
        self.active[name] = model
        self._notify(ev.Activated(model.spec, keep and self._cache is not None))

    def deactivate(self, name: str) -> None:
        del self.active[name]
        self._notify(ev.Deactivated(name))
        if not self.active:
            self.use.held_s += self._context.timeline.now - self._held_since_s

    def forget(self, name: str) -> None:
        """Drop the cached layers of a model that leaves the host's pool."""
        if self._cache is not None:
            self._cache.forget(name)

    def submit_request(self, tracked: TrackedRequest) -> None:
        request = tracked.as_of_now()
        assert request.model in self.active, f"{request.model} is not active here"
        if not self.seqs:
            self._used_since_s = self._context.timeline.now
        spec = self.active[request.model].spec
        self.seqs[request.id] = SeqState(tracked, spec, request.prompt_len)
        self._notify(ev.Submitted(request, self._chained))

    def withdraw(self, request_id: str) -> None:
        self._notify(ev.Withdrawn(request_id))

    def recall(self, request_id: str) -> None:
        self._notify(ev.RecallAsked(request_id))

    def pause(self, name: str) -> None:
        """Stop a model until `resume`, because its memory is being moved."""
        self._paused[name] = self._paused.get(name, 0) + 1
        self._interrupt()

    def resume(self, name: str) -> None:
        self._paused[name] -= 1
        self._release(name)

    def lose(self) -> list[TrackedRequest]:
        """End the slice, and return the requests that were here."""
        self._dead = True
        self.update_use()
        for compute in self._lanes.values():
            compute.stop()
        return [seq.tracked for seq in self.seqs.values()]

    def update_use(self) -> None:
        """Update `use` to the present."""
        now = self._context.timeline.now
        if self.seqs:
            self.use.used_s += now - self._used_since_s
            self._used_since_s = now
        if self.active:
            self.use.held_s += now - self._held_since_s
            self._held_since_s = now
        for compute in self._lanes.values():
            compute.update_use()

    def tokens_sent(self) -> list[tuple[str, int]]:
        """Return the requests here with tokens, and how many their clients have."""
        ahead = {
            part.request_id: times
            for compute in self._lanes.values() for times, parts in compute.ahead()
            for part, _ in parts
        }  # fmt: skip
        return [
            (name, seq.tracked.sampled + ahead.get(name, 0))
            for name, seq in self.seqs.items() if seq.tracked.sampled
        ]  # fmt: skip

    def _notify(self, event: ev.SliceEvent) -> None:
        if self._reports:
            self._report()
        self._interrupt()
        self._context.loops.notify(self.loop, event)

    def _interrupt(self) -> None:
        for compute in self._lanes.values():
            compute.interrupt()

    def lasting(self, lane: Lane, step: Step, alone_s: float) -> float:
        """Return the seconds of a step that begins now, of those that it takes alone."""
        left_s = self._arriving.left_s(step, alone_s)
        took_s = left_s * self._slowdown(lane) * self._arriving.slowdown(lane)
        if self._host is None:
            return took_s
        return max(took_s, self._host.launched_s(step.id) - self._context.timeline.now)

    def _slowdown(self, lane: Lane) -> float:
        """Return how many times as long a lane's step takes beside the other one's, apart from its
        link. What streams has about half of the slice left, and takes some of its memory's rate."""
        if not any(other.computing for name, other in self._lanes.items() if name != lane):
            return 1.0
        simulated = self.simulated
        if lane == "streaming":
            return _BESIDE_RESIDENT
        return 1.0 + simulated.load_bytes_per_s / simulated.hbm_bytes_per_s

    def _report(self) -> None:
        """Tell the controller about once a second what steps took."""
        now = self._context.timeline.now
        if now - self._reported_s <= _REPORT_S:
            return
        self._reported_s = now
        for name, time in self.policy.step_times().items():
            if time.settled is not None:
                times = ev.StepTimes(self.simulated.slice.id, name, *time.settled)
                self._context.controller.notify(times)

    # ---- resident weights (CPUs read theirs in the pool) ---------------------------------------

    def _load(self, model: SimModel) -> None:
        context, name, size = self._context, model.spec.id, model.spec.weight_bytes
        self.use.loads += 1
        assert self._cache is not None
        self._cache.hold(model)
        self.book.weigh(self._cache.held_bytes)
        done = partial(self._loaded, name)
        paths = (self.simulated.h2d, *self.simulated.relays)
        load = PathsLoad(context.network, paths, size, self.simulated.load_bytes_per_s, done)
        self._loading[name] = context.timeline.now, load
        context.controller.notify(ev.InstanceLoading(name, self.simulated.slice.id))

    def _drop_weights(self, name: str) -> None:
        if self._cache is not None:
            self._cache.release(name)
            self.book.weigh(self._cache.held_bytes)
        loading = self._loading.pop(name, None)
        if loading is not None:
            loading[1].stop()
            for run in self._waiting.pop(name, ()):
                self._arriving.dropped(run.step)
                self._notify(ev.StepFailed(run.step.id, f"the weights of {name} are here no more"))

    def holds_kv(self, name: str) -> bool:
        """Return whether a request of the model has KV here."""
        return any(seq.blocks for seq in self.seqs.values() if seq.spec.id == name)

    def _loaded(self, name: str) -> None:
        if self._dead:
            return
        since_s, _ = self._loading.pop(name)
        now = self._context.timeline.now
        took_s = now - since_s
        layers = self._context.models[name].spec.layers  # it may have been deactivated meanwhile
        for run in self._waiting.get(name, ()):
            self._arriving.arrived(run.step, since_s, now, layers)
        self._release(name)
        for seq in self.seqs.values():
            if seq.spec.id == name and seq.tracked.excuses_loads:
                dispatched_s = max(seq.tracked.dispatched_s, since_s)
                seq.tracked.grace_s += now - dispatched_s
        self._notify(ev.Fetched(name, took_s))
        self._context.controller.notify(ev.InstanceReady(name, self.simulated.slice.id, took_s))

    def _blocked(self, name: str) -> bool:
        return self._paused.get(name, 0) > 0 or name in self._loading

    def _release(self, name: str) -> None:
        if not self._blocked(name):
            for run in self._waiting.pop(name, ()):
                if run.step.id in self._arriving:  # most of its kernels are launched
                    self._launched(run)
                else:
                    self._launch(run)

    # ---- steps ----------------------------------------------------------------------------------

    def submit(self, action: SliceAction | BaselineSliceAction) -> None:
        if isinstance(action, RunStep):
            self._run(action)
        elif isinstance(action, Drop):
            seq = self.seqs[action.request_id]
            self.book.release(seq)
            if action.requeued:
                seq.tracked.preempted += 1
            else:
                self._remove(seq)
                self._context.controller.dropped(seq.tracked)
        elif isinstance(action, Move):
            self._move(action)
        elif isinstance(action, SavePrefix | BringPrefix):
            self._move_prefix(action)
        elif isinstance(action, DropPrefix):
            self.prefixes.drop(action)
        elif isinstance(action, SetAlpha):
            for compute in self._lanes.values():
                compute.alphas[action.model] = action.alpha
        elif isinstance(action, Fetch):
            self._load(self.active[action.model])
        elif isinstance(action, Release):
            self._drop_weights(action.model)
        elif isinstance(action, Truncate):
            seq = self.seqs[action.request_id]
            self.book.release(seq)
            self._remove(seq)
            self._context.controller.truncated(seq.tracked)
        elif isinstance(action, Return):
            seq = self.seqs[action.request_id]
            self._remove(seq)
            self._context.controller.returned(seq.tracked)
        else:
            raise TypeError(f"no simulated step fails: {action}")

    def _run(self, run: RunStep) -> None:
        """Submit a run. Steps of models that cannot compute now wait beside the line.

        If one of several steps has to wait, each of them runs once."""
        if not self._paused and not self._loading:
            self._launch(run)
            return
        steps = (run.step, *run.then)
        if not any(self._blocked(step.model) for step in steps):
            self._launch(run)
            return
        for step in steps:
            if self._blocked(step.model):
                self._waiting.setdefault(step.model, []).append(RunStep(step))
                if step.model in self._loading:
                    self._arrive(step)
                self._notify(ev.StepParked(step.id))
            else:
                self._launch(RunStep(step))

    def _arrive(self, step: Step) -> None:
        """Begin a step whose layers run as their weights arrive."""
        context, simulated, now = self._context, self.simulated, self._context.timeline.now
        model = context.models[step.model]
        begins_s = now if self._host is None else self._host.launch(step, now)
        load_s = model.spec.weight_bytes / simulated.load_bytes_per_s
        compute_s = context.costs.step(step, model, simulated, 1.0).floor_s
        self._arriving.begin(step, begins_s, compute_s / load_s)

    def _launch(self, run: RunStep) -> None:
        if self._host is None:
            self._launched(run)
        else:
            timeline = self._context.timeline
            timeline.at(self._host.launch(run.step, timeline.now), self._launched, run)

    def _launched(self, run: RunStep) -> None:
        if not self._dead:
            self._lanes[run.step.lane].submit(run)

    def step_over(self, event: ev.SliceEvent) -> None:
        """Notify the policy of a step's end, with the time that a live slice would give it."""
        if self._host is not None and isinstance(event, ev.StepDone):
            took_s = self._host.ended(event.step_id, self._context.timeline.now)
            event = replace(event, compute_s=took_s)
        self._notify(event)

    def _move(self, move: Move) -> None:
        """Move KV over the links of weights; it leaves in the other direction."""
        seq = self.seqs[move.request_id]
        self.book.move(seq, move)
        if move.ids:
            self.prefixes.move(move)
        size = len(move.blocks) * seq.spec.kv_block_bytes
        self.use.moved_bytes += size
        engine = self._in if move.direction == "in" else self._out
        engine.submit(size, move.direction != "copy", partial(self._moved, seq, move))

    def _moved(self, seq: SeqState, move: Move) -> None:
        if not self._dead:
            self.book.moved(seq)
            if move.ids:
                self.prefixes.moved(move)
            self._notify(ev.MoveDone(move.request_id, move.direction))

    def _move_prefix(self, action: SavePrefix | BringPrefix) -> None:
        self.prefixes.begin(action)
        size = len(action.ids) * action.block_bytes
        since_s = self._context.timeline.now
        done = partial(self._prefix_moved, action, since_s)
        if isinstance(action, BringPrefix):
            self.use.prefix_bytes += size
            self._in.submit(size, True, done)
        else:
            self._out.submit(size, False, done)

    def _prefix_moved(self, action: SavePrefix | BringPrefix, since_s: float) -> None:
        if not self._dead:
            self.prefixes.end(action)
            self._notify(ev.PrefixMoved(action.move, self._context.timeline.now - since_s))

    def finished(self, seq: SeqState) -> None:
        self.book.release(seq)
        self._remove(seq)
        self._context.controller.finished(seq.tracked)

    def _remove(self, seq: SeqState) -> None:
        del self.seqs[seq.tracked.request.id]
        if not self.seqs:
            self.use.used_s += self._context.timeline.now - self._used_since_s
