"""What computes on a slice: steps in the order they were asked for, one at a time."""

from collections import deque
from collections.abc import Callable, Mapping
from math import inf, sqrt

from c2cserve.core import events as ev
from c2cserve.core.actions import RunStep
from c2cserve.core.step import SeqStep, Step
from c2cserve.sim.world.bursts import Burst
from c2cserve.sim.world.checks import BlockBook, SeqState
from c2cserve.sim.world.hardware import Lane
from c2cserve.sim.world.links import Flow
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.shared import Use, World
from c2cserve.sim.world.weight_cache import KeptWeights

_STEADY = 4
"""What a slice keeps of a model is taken to stay as it is for one step more for every so many that
it has been so: it changes with the traffic of all models there, which is asked of each step."""

Parts = list[tuple[SeqStep, SeqState]]
"""A step's sequences."""

_WAITED = 1.001
"""A step that took so many times its floor waited for the link: less is rounding."""


class Compute:
    def __init__(
        self,
        lane: Lane,
        world: World,
        seqs: Mapping[str, SeqState],
        book: BlockBook,
        kept: KeptWeights | None,
        tell: Callable[[ev.SliceEvent], None],
        finished: Callable[[SeqState], None],
    ) -> None:
        """`kept`: of weights that stream; None: all are in the slice's memory. `finished` is called
        for sequences that have drawn all they owe, before the step is told to be done."""
        self.use = Use()
        self.alphas: dict[str, float] = {}
        """Model -> share of its hybrid GEMMs' columns that are output-stationary."""
        self._lane, self._world = lane, world
        self._seqs, self._book, self._kept = seqs, book, kept
        self._tell, self._finished = tell, finished
        self._dead = False
        self._line: deque[RunStep] = deque()
        """The first of them is under way."""
        self._started_s = 0.0
        """When it began."""
        self._step_s = 0.0
        """When the step, or the burst, that is under way began."""
        self._turn = self._position = 0
        """Which of the run's steps that is, and where in its order."""
        self._steps: tuple[Step, ...] = ()
        """Of the run."""
        self._parts: list[Parts] = []
        """Of each of them."""
        self._times: list[int] = []
        """How often each of them has run."""
        self._took_s: list[float] = []
        self._stopping = False
        self._burst: Burst | None = None
        self._streams = 0.0
        """Bytes of weights that each step of the burst brings over the link."""
        self._found: dict[str, tuple[float, int]] = {}
        """Model -> share of its weights that its last step found here, and for how many steps it
        has been so."""
        self._plan = 0
        """Number of the latest plan for when what runs is done; earlier ones are void."""
        self._flow: Flow | None = None
        self._last_model = ""
        self._floor_s = self._compute_share = 0.0
        """Of the step under way."""
        self._memory_bytes = self._moved_before = 0.0
        """What the step under way moves in memory; and what its link had carried when it began."""

    def submit(self, run: RunStep) -> None:
        self._line.append(run)
        if len(self._line) == 1:
            self._start()

    def models(self) -> set[str]:
        """Of the steps in line."""
        return {step.model for run in self._line for step in (run.step, *run.then)}

    def interrupt(self) -> None:
        """The policy is told something: what runs in an order stops at the end of its step."""
        if not self._line or not self._line[0].order:
            return
        self._stopping = True
        burst = self._burst
        if burst is None:
            return
        network, now = self._world.network, self._world.timeline.now
        if self._flow is not None:
            whole, left = burst.work, network.left(self._flow)
            if burst.cut(whole - left):
                network.shorten(self._flow, max(1e-12, burst.work - (whole - left)))
        elif burst.cut(now - self._step_s):
            self._plan += 1
            end_s = self._step_s + burst.work
            self._world.timeline.at(end_s, self._burst_done, self._plan)

    def settle(self) -> None:
        """Bring `use` up to now."""
        if self._line:
            now = self._world.timeline.now
            self.use.busy_s += now - self._started_s
            self._started_s = now

    def stop(self) -> None:
        """For good: the slice is lost."""
        self.settle()
        self._dead = True
        if self._flow is not None:
            self._world.network.stop(self._flow)

    def _start(self) -> None:
        """What is first in line begins: one step, or several in an order."""
        run = self._line[0]
        self._started_s = self._world.timeline.now
        order = run.order
        if not run.then:
            steps = self._steps = (run.step,)
            self._parts = [self._begin(run.step, len(order) or 1)]
            self._times, self._took_s = [0], [0.0]
        else:
            steps = self._steps = (run.step, *run.then)
            self._parts = [self._begin(step, order.count(i)) for i, step in enumerate(steps)]
            self._times, self._took_s = [0] * len(steps), [0.0] * len(steps)
        self._stopping = False
        self._position = 0
        if not order or not self._start_burst(run, steps):
            self._turn = order[0] if order else 0
            self._start_step(steps[self._turn])

    def _begin(self, step: Step, times: int) -> Parts:
        """The step's sequences, which it is about to compute so many times."""
        seqs, begin, parts = self._seqs, self._book.begin, Parts()
        for part in step.seqs:
            seq = seqs[part.request_id]
            begin(seq, part, times)
            assert part.start == seq.computed, f"{part.request_id}: a token is skipped or repeated"
            assert part.emits == (part.start + part.tokens == seq.length)
            parts.append((part, seq))
        return parts

    def _start_step(self, step: Step) -> None:
        world, lane, model = self._world, self._lane, self._world.models[step.model]
        self._step_s = world.timeline.now
        self._switch(step.model)
        kept, steps = self._keep(model, self._step_s, 1)
        if kept < 1.0 and self._start_stream(step, model, kept, steps // _STEADY):
            return
        alpha = self.alphas.get(step.model, 0.0) if world.hybrid else None
        cost = world.costs.step(step, model, lane, kept, alpha, self._times[self._turn])
        floor_s = cost.floor_s
        if world.noise:
            floor_s *= world.random.lognormvariate(0.0, world.noise)
        self._floor_s, self._compute_share = floor_s, cost.compute_share
        streamed = cost.link_bytes if lane.h2d else 0.0
        self.use.streamed_bytes += streamed
        if alpha is not None and lane.h2d:
            self._memory_bytes = cost.memory_bytes
            self._moved_before = world.network.moved_bytes(lane.h2d[0])
        if lane.compute:
            self._flow = world.network.start((lane.compute,), floor_s, 1.0, self._step_done)
        elif streamed > 0:
            rate = streamed / floor_s
            self._flow = world.network.start(lane.h2d, streamed, rate, self._step_done)
        else:
            self._plan += 1
            world.timeline.at(self._step_s + floor_s, self._step_done, self._plan)

    def _switch(self, name: str) -> None:
        if name != self._last_model:
            self.use.switches += bool(self._last_model)
            self._last_model = name

    def _step_done(self, plan: int | None = None) -> None:
        """A step has run that is simulated on its own; the next of its round follows."""
        if self._dead or (plan is not None and plan != self._plan):
            return
        turn, now = self._turn, self._world.timeline.now
        self._flow = None
        self._took_s[turn] += now - self._step_s
        self._times[turn] += 1
        self._account(now - self._step_s)
        if self._world.hybrid and self._lane.h2d:
            self._measure_gemms(self._steps[turn], now - self._step_s)
        self._go_on(1, self._advance(turn, 1, now, 0.0))

    def _go_on(self, steps: int, ended: bool) -> None:
        """So many more have run; the next one of the order follows unless a sequence has ended, or
        the policy has been told something."""
        order = self._line[0].order
        self._position += steps
        if ended or self._stopping or self._position >= len(order):
            self._finish()
        else:
            turn = self._turn = order[self._position]
            self._start_step(self._steps[turn])

    # ---- an order of decodes as one event -------------------------------------------------------

    def _start_burst(self, run: RunStep, steps: tuple[Step, ...]) -> bool:
        """False: weights stream, so that times depend on who else does: step by step."""
        world, lane = self._world, self._lane
        self._step_s = world.timeline.now
        models = [world.models[step.model] for step in steps]
        if self._kept is not None and not all(self._kept.all_of(model) for model in models):
            return False
        owed = [min([seq.job.owed - seq.job.drawn for _, seq in parts]) for parts in self._parts]
        scale = 1.0
        if world.noise:
            spread = world.noise / sqrt(min(len(run.order), *owed))
            scale = world.random.lognormvariate(0.0, spread)
        ahead = min(len(run.order) // len(steps), *owed) // 2
        costs = [
            world.costs.step(step, model, lane, 1.0, None, ahead)
            for step, model in zip(steps, models, strict=True)
        ]
        self._floor_s, self._compute_share = inf, costs[0].compute_share
        burst = self._burst = Burst([scale * cost.floor_s for cost in costs], run.order, owed)
        if lane.compute:
            route = (lane.compute,)
            self._flow = world.network.start(route, burst.work, 1.0, self._burst_done)
        else:
            self._plan += 1
            world.timeline.at(self._step_s + burst.work, self._burst_done, self._plan)
        return True

    def _start_stream(self, step: Step, model: SimModel, kept: float, most: int) -> bool:
        """Several of an order of one model's decodes as one flow over the link, which takes longer
        or shorter as others come and go; `most` of them, as what the slice keeps of its weights is
        taken to change no sooner. False: the next one has to be simulated on its own."""
        world, lane, left = self._world, self._lane, len(self._line[0].order) - self._position
        if left < 2 or most < 2 or self._line[0].then or world.hybrid or lane.compute:
            return False
        times = min(left, most, *[seq.job.owed - seq.job.drawn for _, seq in self._parts[0]])
        ahead = self._times[0] + times // 2
        cost = world.costs.step(step, model, lane, kept, None, ahead)
        self._floor_s, self._compute_share = cost.floor_s, cost.compute_share
        if world.noise:
            self._floor_s *= world.random.lognormvariate(0.0, world.noise / sqrt(times))
        self._streams = cost.link_bytes
        rate = cost.link_bytes / self._floor_s
        burst = self._burst = Burst([cost.link_bytes], (0,) * times, [times])
        self._flow = world.network.start(lane.h2d, burst.work, rate, self._burst_done)
        return True

    def _burst_done(self, plan: int | None = None) -> None:
        if self._dead or (plan is not None and plan != self._plan):
            return
        burst, run, now = self._burst, self._line[0], self._world.timeline.now
        assert burst is not None
        self._burst = self._flow = None
        stretch = (now - self._step_s) / burst.work
        self._account(now - self._step_s, burst.length)
        self.use.streamed_bytes += burst.length * self._streams
        ended = False
        for index, (times, first, last) in enumerate(burst.spans()):
            self._times[index] += times
            self._took_s[index] += stretch * burst.costs[index] * times
            if times:
                name = self._steps[index].model
                self._switch(name)
                if more := times - (self._streams > 0.0):
                    self._keep(self._world.models[name], now, more)
                gap_s = stretch * (last - first) / (times - 1) if times > 1 else 0.0
                ended |= self._advance(index, times, self._step_s + stretch * last, gap_s)
        if run.then:
            self.use.switches += burst.length - 2
        self._streams = 0.0
        self._go_on(burst.length, ended)

    def _keep(self, model: SimModel, now: float, times: int) -> tuple[float, int]:
        """So many steps of it begin, and what streams by is kept. The share of its weights that is
        here, and for how many steps it has been so."""
        if self._kept is None:
            return 1.0, times
        kept = self._kept.use(model, now, times)
        before, steps = self._found.get(model.spec.id, (kept, 0))
        found = self._found[model.spec.id] = kept, times + (steps if kept == before else 0)
        return found

    # ---- what steps come to ---------------------------------------------------------------------

    def _account(self, took_s: float, steps: int = 1) -> None:
        """What decided how long that took. A step that took longer than its floor waited for the
        link, all along: nothing else would have made it shorter."""
        use = self.use
        use.kv_byte_s += self._book.held_bytes * took_s
        if took_s > steps * self._floor_s * _WAITED and not self._lane.compute:
            use.link_s += took_s
        else:
            use.compute_s += took_s * self._compute_share
            use.memory_s += took_s * (1.0 - self._compute_share)

    def _advance(self, index: int, times: int, last_s: float, gap_s: float) -> bool:
        """A step of the run ran so many times, the last one until `last_s`. True: a sequence has
        ended."""
        self.use.steps += times
        ended, computed = False, 0
        for part, seq in self._parts[index]:
            tokens = part.tokens * times
            seq.computed += tokens
            computed += tokens
            if part.emits:
                job = seq.job
                seq.length += times
                before, seq.drawn = seq.drawn, seq.drawn + times
                job.draw(times, last_s, gap_s)
                if job.drawn == 1:
                    first = ev.FirstToken(part.request_id, job.ttft_s)
                    self._world.controller.tell(first)
                if job.resumed and before < ev.PROGRESS_TOKENS <= seq.drawn:
                    after_s = last_s - job.request.arrival_s
                    self._world.controller.tell(ev.Progressed(part.request_id, after_s))
                if job.drawn >= job.owed:
                    ended = True
        self.use.tokens += computed
        return ended

    def _finish(self) -> None:
        """Tell the policy of the steps of a run, and let go of what has ended."""
        now = self._world.timeline.now
        self._line.popleft()
        self.use.busy_s += now - self._started_s
        every = zip(self._steps, self._parts, self._times, self._took_s, strict=True)
        for step, parts, times, took_s in every:
            outcomes: list[ev.SeqOutcome] = []
            for part, seq in parts if times else ():
                if part.emits:
                    finished = seq.job.drawn >= seq.job.owed
                    outcomes.append(ev.SeqOutcome(part.request_id, times, finished))
                    if finished:
                        self._finished(seq)
            self._tell(ev.StepDone(step.id, tuple(outcomes), took_s, times))
        if self._line:
            self._start()

    def _measure_gemms(self, step: Step, took_s: float) -> None:
        network, link = self._world.network, self._lane.h2d[0]
        moved = network.moved_bytes(link) - self._moved_before
        memory = self._memory_bytes / (took_s * self._lane.hbm_bytes_per_s)
        use = moved / (took_s * network.links[link].bytes_per_s)
        self._tell(ev.GemmsMeasured(step.model, took_s, min(1.0, memory), min(1.0, use)))
