"""What computes on a slice: steps in the order they were asked for, one at a time."""

from collections import deque
from collections.abc import Callable, Mapping
from math import sqrt

from c2cserve.core import events as ev
from c2cserve.core.actions import RunStep
from c2cserve.core.step import Step
from c2cserve.sim.bursts import Burst
from c2cserve.sim.checks import BlockBook, SeqState
from c2cserve.sim.hardware import Lane
from c2cserve.sim.kept import KeptWeights
from c2cserve.sim.links import Flow
from c2cserve.sim.shared import Use, World


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
        """When the step under way began, where rounds are simulated one by one."""
        self._turn = 0
        """Which of the run's steps that is."""
        self._rounds: list[int] = []
        """Rounds that each of the run's steps has done."""
        self._took_s: list[float] = []
        self._stopping = False
        self._burst: Burst | None = None
        self._plan = 0
        """Number of the latest plan for when what runs is done; earlier ones are void."""
        self._flow: Flow | None = None
        self._last_model = ""
        self._memory_bytes = self._moved_before = 0.0
        """What the step under way moves in memory; and what its link had carried when it began."""

    def submit(self, run: RunStep) -> None:
        self._line.append(run)
        if len(self._line) == 1:
            self._start()

    def interrupt(self) -> None:
        """The policy is told something: what goes on for rounds stops at the end of its step."""
        if not self._line or self._line[0].rounds == 1:
            return
        burst = self._burst
        if burst is None:
            self._stopping = True
            return
        network, now = self._world.network, self._world.timeline.now
        if self._flow is not None:
            whole, left = burst.work, network.left(self._flow)
            if burst.cut(whole - left):
                network.shorten(self._flow, max(1e-12, burst.work - (whole - left)))
        elif burst.cut(now - self._started_s):
            self._plan += 1
            end_s = self._started_s + burst.work
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
        """What is first in line begins: one step, or rounds of several."""
        run = self._line[0]
        self._started_s = self._world.timeline.now
        steps = (run.step, *run.then)
        for step in steps:
            self._check(step, run.rounds)
        self._rounds = [0] * len(steps)
        self._took_s = [0.0] * len(steps)
        self._stopping = False
        if run.rounds == 1 or not self._start_burst(run, steps):
            self._turn = 0
            self._start_step(run.step)

    def _check(self, step: Step, rounds: int) -> None:
        for part in step.seqs:
            seq = self._seqs[part.request_id]
            self._book.begin(seq, part, rounds)
            assert part.start == seq.computed, f"{part.request_id}: a token is skipped or repeated"
            assert part.emits == (part.start + part.tokens == seq.length)

    def _start_step(self, step: Step) -> None:
        world, lane, model = self._world, self._lane, self._world.models[step.model]
        self._step_s = world.timeline.now
        self._switch(step.model)
        kept = 1.0 if self._kept is None else self._kept.use(model, self._step_s)
        alpha = self.alphas.get(step.model, 0.0) if world.hybrid else None
        cost = world.costs.step(step, model, lane, kept, alpha, self._rounds[self._turn])
        floor_s = cost.floor_s
        if world.noise:
            floor_s *= world.random.lognormvariate(0.0, world.noise)
        streamed = cost.link_bytes if lane.h2d and world.streams else 0.0
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
        run, turn = self._line[0], self._turn
        step = run.then[turn - 1] if turn else run.step
        now = self._world.timeline.now
        self._flow = None
        self._took_s[turn] += now - self._step_s
        self._rounds[turn] += 1
        if self._world.hybrid and self._lane.h2d:
            self._measure_gemms(step, now - self._step_s)
        ended = self._advance(step, 1, now, 0.0)
        self._turn = (turn + 1) % (1 + len(run.then))
        if ended or self._stopping or self._rounds[self._turn] == run.rounds:
            self._finish(run)
        else:
            self._start_step(run.then[self._turn - 1] if self._turn else run.step)

    # ---- rounds of decodes as one event ---------------------------------------------------------

    def _start_burst(self, run: RunStep, steps: tuple[Step, ...]) -> bool:
        """False: weights stream, so that times depend on who else does: step by step."""
        world, lane, now = self._world, self._lane, self._world.timeline.now
        models = [world.models[step.model] for step in steps]
        if self._kept is not None and not all(self._kept.all_of(model) for model in models):
            return False
        owed = [min(self._owed(part.request_id) for part in step.seqs) for step in steps]
        rounds = min(run.rounds, *owed)
        scale = 1.0
        if world.noise:
            spread = world.noise / sqrt(rounds * len(steps))
            scale = world.random.lognormvariate(0.0, spread)
        costs = [
            scale * world.costs.step(step, model, lane, 1.0, None, rounds // 2).floor_s
            for step, model in zip(steps, models, strict=True)
        ]
        burst = self._burst = Burst.planned(costs, run.rounds, owed)
        if lane.compute:
            route = (lane.compute,)
            self._flow = world.network.start(route, burst.work, 1.0, self._burst_done)
        else:
            self._plan += 1
            world.timeline.at(now + burst.work, self._burst_done, self._plan)
        return True

    def _owed(self, request_id: str) -> int:
        job = self._seqs[request_id].job
        return job.owed - job.drawn

    def _burst_done(self, plan: int | None = None) -> None:
        if self._dead or (plan is not None and plan != self._plan):
            return
        burst, run, now = self._burst, self._line[0], self._world.timeline.now
        assert burst is not None
        self._burst = self._flow = None
        stretch = (now - self._started_s) / burst.work
        gap_s = stretch * burst.round_work
        for index, step in enumerate((run.step, *run.then)):
            rounds = self._rounds[index] = burst.counts[index]
            self._took_s[index] = stretch * burst.costs[index] * rounds
            if rounds:
                self._switch(step.model)
                if self._kept is not None:
                    self._kept.use(self._world.models[step.model], now, rounds)
                last_s = self._started_s + stretch * burst.end_of(index)
                self._advance(step, rounds, last_s, gap_s)
        if run.then:
            self.use.switches += sum(burst.counts) - len(burst.counts)
        self._finish(run)

    # ---- what steps come to ---------------------------------------------------------------------

    def _advance(self, step: Step, rounds: int, last_s: float, gap_s: float) -> bool:
        """The step ran so many times, the last one until `last_s`. True: a sequence has ended."""
        use, world = self.use, self._world
        use.steps += rounds
        ended = False
        for part in step.seqs:
            seq = self._seqs[part.request_id]
            seq.computed += part.tokens * rounds
            use.tokens += part.tokens * rounds
            if part.emits:
                job = seq.job
                seq.length += rounds
                job.draw(rounds, last_s, gap_s)
                if job.drawn == 1:
                    world.controller.tell(ev.FirstToken(part.request_id, job.ttft_s))
                ended |= job.drawn >= job.owed
        return ended

    def _finish(self, run: RunStep) -> None:
        """Tell the policy of the steps of a run, and let go of what has ended."""
        now = self._world.timeline.now
        self._line.popleft()
        self.use.busy_s += now - self._started_s
        for index, step in enumerate((run.step, *run.then)):
            rounds = self._rounds[index]
            outcomes: list[ev.SeqOutcome] = []
            for part in step.seqs:
                if not part.emits or not rounds:
                    continue
                seq = self._seqs[part.request_id]
                finished = seq.job.drawn >= seq.job.owed
                outcomes.append(ev.SeqOutcome(part.request_id, rounds, finished))
                if finished:
                    self._finished(seq)
            self._tell(ev.StepDone(step.id, tuple(outcomes), self._took_s[index], rounds))
        if self._line:
            self._start()

    def _measure_gemms(self, step: Step, took_s: float) -> None:
        network, link = self._world.network, self._lane.h2d[0]
        moved = network.moved_bytes(link) - self._moved_before
        memory = self._memory_bytes / (took_s * self._lane.hbm_bytes_per_s)
        use = moved / (took_s * network.links[link].bytes_per_s)
        self._tell(ev.GemmsMeasured(step.model, took_s, min(1.0, memory), min(1.0, use)))
