"""The compute of a simulated slice: steps in the order of their submission, one at a time."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from math import inf, sqrt

from c2cserve.core import events as ev
from c2cserve.core.actions import RunStep
from c2cserve.core.step import Lane, Step
from c2cserve.sim.world.bursts import Burst, Parts, fewest_left, times_of
from c2cserve.sim.world.checks import BlockBook, SeqState
from c2cserve.sim.world.context import ComputingSlice, SimulationContext, SliceUse
from c2cserve.sim.world.costs import spread_of
from c2cserve.sim.world.hardware import SimulatedSlice
from c2cserve.sim.world.links import Flow
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.weight_cache import WeightCache

_STEADY = 4
"""If the cached share of a model did not change for n steps, it is assumed to hold for n / 4 more.
It depends on the traffic of all models on the slice, so it cannot be assumed for long."""

_WAITED = 1.001
"""A step that took this many times its floor waited for the link. Less is rounding."""


class Compute:
    def __init__(
        self,
        simulated: SimulatedSlice,
        context: SimulationContext,
        seqs: dict[str, SeqState],
        book: BlockBook,
        cached: WeightCache | None,
        use: SliceUse,
        owner: ComputingSlice,
        lane: Lane,
    ) -> None:
        """`cache` holds weights that stream; None: all are in the slice's memory."""
        self.use = use
        self._owner = owner
        self._lane: Lane = lane
        self.alphas: dict[str, float] = {}
        """Model -> share of its hybrid GEMMs' columns that are output-stationary."""
        self._simulated, self._context = simulated, context
        self._route, self._h2d = simulated.compute, simulated.h2d
        self._seqs, self._book, self._cache = seqs, book, cached
        self._dead = False
        self._line: deque[RunStep] = deque()
        """Runs in line; the first of them is under way."""
        self._started_s = 0.0
        """When that run began."""
        self._step_s = 0.0
        """When the step, or the burst, that is under way began."""
        self._current = self._position = 0
        """Index of that step in the run, and position in the run's order."""
        self._steps: tuple[Step, ...] = ()
        """Steps of the run."""
        self._parts: list[Parts] = []
        """Sequences of each step."""
        self._times: list[int] = []
        """How often each of them has run."""
        self._took_s: list[float] = []
        self._stopping = False
        self._burst: Burst | None = None
        self._streams = 0.0
        """Bytes of weights that each step of the burst brings over the link."""
        self._found: dict[str, tuple[float, int]] = {}
        """Model -> share of its weights that its last step found, and how many steps found that."""
        self._plan = 0
        """Number of the latest plan for the end of the step or burst; earlier plans are void."""
        self._flow: Flow | None = None
        self._last_model = ""
        self._streamed_bytes = 0.0
        """Bytes that the step under way, or the last one, brings over the link."""
        self._floor_s = self._compute_share = 0.0
        """Floor of the step under way, and the share of it that compute sets."""
        self._memory_bytes = self._moved_before = 0.0
        """Bytes that the step under way moves in memory, and bytes on its link before it began."""

    def submit(self, run: RunStep) -> None:
        self._line.append(run)
        if len(self._line) == 1:
            self._start()

    @property
    def computing(self) -> bool:
        """A step is under way."""
        return bool(self._line)

    def models(self) -> set[str]:
        """Return the models of the steps in line."""
        return {step.model for run in self._line for step in (run.step, *run.then)}

    def ahead(self) -> Iterable[tuple[int, Parts]]:
        """Return how often each step of the burst under way has run, and its sequences."""
        if self._burst is None:
            return ()
        done = self._context.timeline.now - self._step_s
        if self._flow is not None:
            done = self._burst.work - self._context.network.left(self._flow)
        return zip(self._burst.runs(done), self._parts, strict=True)

    def interrupt(self) -> None:
        """End a run with an order after its present step, because the policy gets an event."""
        if not self._line or not self._line[0].order:
            return
        self._stopping = True
        burst = self._burst
        if burst is None:
            return
        network, now = self._context.network, self._context.timeline.now
        if self._flow is not None:
            whole, left = burst.work, network.left(self._flow)
            if burst.cut(whole - left):
                network.shorten(self._flow, max(1e-12, burst.work - (whole - left)))
        elif burst.cut(now - self._step_s):
            self._plan += 1
            end_s = self._step_s + burst.work
            self._context.timeline.at(end_s, self._burst_done, self._plan)

    def update_use(self) -> None:
        """Update `use` to the present."""
        if self._line:
            now = self._context.timeline.now
            self.use.busy_s += now - self._started_s
            self._started_s = now

    def stop(self) -> None:
        """Stop for good: the slice is lost."""
        self.update_use()
        self._dead = True
        if self._flow is not None:
            self._context.network.stop(self._flow)

    def _start(self) -> None:
        """Begin the first run in line: one step, or several in an order."""
        run = self._line[0]
        self._started_s = self._context.timeline.now
        order = run.order
        if not run.then:
            step, parts = run.step, self._begin(run.step, len(order) or 1)
            if len(parts) < len(step.seqs):
                step = replace(step, seqs=tuple([part for part, _ in parts]))
            steps: tuple[Step, ...] = (step,)
            self._steps, self._parts = steps, [parts]
            self._times, self._took_s = [0], [0.0]
        else:
            steps = self._steps = (run.step, *run.then)
            runs = times_of(order, len(steps))
            self._parts = [self._begin(step, runs[i]) for i, step in enumerate(steps)]
            for step, parts in zip(steps, self._parts, strict=True):
                assert len(parts) == len(step.seqs), "a request has ended, and its run has not"
            self._times, self._took_s = [0] * len(steps), [0.0] * len(steps)
        self._stopping = False
        self._position = 0
        if not steps[0].seqs:
            self._times[0] = 1
            self._finish()
        elif not order or not self._start_burst(run, steps):
            self._current = order[0] if order else 0
            self._start_step(steps[self._current])

    def _begin(self, step: Step, times: int) -> Parts:
        """Begin a step that runs `times` times, and return its sequences. Requests that have ended
        since it was decided are not among them."""
        seqs, book = self._seqs, self._book
        parts: Parts = []
        for part in step.seqs:
            seq = seqs.get(part.request_id)
            if seq is None:
                continue
            book.begin(seq, part, times)
            assert part.start == seq.computed, f"{part.request_id}: a token is skipped or repeated"
            assert part.emits == (part.start + part.tokens == seq.length)
            parts.append((part, seq))
        return parts

    def _start_step(self, step: Step) -> None:
        context, simulated, h2d = self._context, self._simulated, self._h2d
        model, self._step_s = context.models[step.model], context.timeline.now
        self._switch(step.model)
        cached, steps = self._use_weights(model, self._step_s, 1)
        if cached < 1.0 and self._start_stream(step, model, cached, steps // _STEADY):
            return
        alpha = self.alphas.get(step.model, context.hybrid)
        cost = context.costs.step(step, model, simulated, cached, alpha, self._times[self._current])
        scale = spread_of(context.random, context.noise) if context.noise else 1.0
        alone_s = scale * context.costs.lasting_s(cost, simulated, self._step_s)
        floor_s = self._owner.lasting(self._lane, step, alone_s)
        self._floor_s, self._compute_share = floor_s, cost.compute_share
        streamed = self._streamed_bytes = cost.link_bytes if h2d else 0.0
        self.use.streamed_bytes += streamed
        if alpha is not None and h2d:
            self._memory_bytes = cost.memory_bytes
            self._moved_before = context.network.moved_bytes(h2d[0])
        if self._route:
            self._flow = context.network.start((self._route,), floor_s, 1.0, self._step_done)
        elif streamed > 0:
            rate = streamed / floor_s
            self._flow = context.network.start(h2d, streamed, rate, self._step_done)
        else:
            self._plan += 1
            context.timeline.at(self._step_s + floor_s, self._step_done, self._plan)

    def _switch(self, name: str) -> None:
        if name != self._last_model:
            self.use.switches += bool(self._last_model)
            self._last_model = name

    def _step_done(self, plan: int | None = None) -> None:
        """End a step that is simulated on its own, and go on with the next."""
        if self._dead or (plan is not None and plan != self._plan):
            return
        current, now = self._current, self._context.timeline.now
        self._flow = None
        self._took_s[current] = self._took_s[current] + (now - self._step_s)
        self._times[current] = self._times[current] + 1
        self._account(now - self._step_s)
        if self._context.hybrid is not None and self._h2d:
            self._measure_gemms(self._steps[current], now - self._step_s)
        self._go_on(1, self._advance(current, 1, now, 0.0))

    def _go_on(self, steps: int, ended: bool) -> None:
        """Begin the next step of the order after `steps` steps.

        The run ends if a sequence has ended, or if the policy has got an event."""
        order = self._line[0].order
        self._position += steps
        if ended or self._stopping or self._position >= len(order):
            self._finish()
        else:
            current = self._current = order[self._position]
            self._start_step(self._steps[current])

    # ---- an order of decodes as one event -------------------------------------------------------

    def _start_burst(self, run: RunStep, steps: tuple[Step, ...]) -> bool:
        """Begin the run as one event. Return False if its weights stream: then each step is one,
        because times depend on other streams."""
        context, simulated = self._context, self._simulated
        self._step_s = context.timeline.now
        models = [context.models[step.model] for step in steps]
        if self._cache is not None and not all(self._cache.all_of(model) for model in models):
            return False
        remaining = [fewest_left(parts) for parts in self._parts]
        scale, fewest = 1.0, min(remaining)
        if context.noise:
            spread = context.noise / sqrt(min(len(run.order), fewest))
            scale = spread_of(context.random, spread)
        extra_tokens = min(len(run.order) // len(steps), fewest) // 2
        floors_s: list[float] = []
        for step, model in zip(steps, models, strict=True):
            cost = context.costs.step(step, model, simulated, 1.0, None, extra_tokens)
            if not floors_s:
                self._floor_s, self._compute_share = inf, cost.compute_share
            floors_s.append(scale * cost.floor_s)
        burst = self._burst = Burst(floors_s, run.order, remaining)
        if self._route:
            route = (self._route,)
            self._flow = context.network.start(route, burst.work, 1.0, self._burst_done)
        else:
            self._plan += 1
            context.timeline.at(self._step_s + burst.work, self._burst_done, self._plan)
        return True

    def _start_stream(self, step: Step, model: SimModel, cached: float, most: int) -> bool:
        """Begin several decodes of one model as one flow over the link.

        The flow slows down and speeds up with the others on the link. It has at most `most` steps:
        so long the cached share is assumed to hold. Return False if the next step must be simulated
        on its own."""
        context, simulated = self._context, self._simulated
        left = len(self._line[0].order) - self._position
        hybrid, several = context.hybrid is not None, self._line[0].then
        if left < 2 or most < 2 or several or hybrid or self._route:
            return False
        times = min(left, most, fewest_left(self._parts[0]))
        extra_tokens = self._times[0] + times // 2
        cost = context.costs.step(step, model, simulated, cached, None, extra_tokens)
        self._floor_s, self._compute_share = cost.floor_s, cost.compute_share
        if context.noise:
            self._floor_s *= spread_of(context.random, context.noise / sqrt(times))
        self._streams = cost.link_bytes
        rate = cost.link_bytes / self._floor_s
        burst = self._burst = Burst([cost.link_bytes], (0,) * times, [times])
        self._flow = context.network.start(self._h2d, burst.work, rate, self._burst_done)
        return True

    def _burst_done(self, plan: int | None = None) -> None:
        if self._dead or (plan is not None and plan != self._plan):
            return
        burst, run, now = self._burst, self._line[0], self._context.timeline.now
        assert burst is not None
        self._burst = self._flow = None
        stretch = (now - self._step_s) / burst.work
        self._account(now - self._step_s, burst.length)
        self.use.streamed_bytes += burst.length * self._streams
        ended = False
        for index, (times, first, last) in enumerate(burst.spans()):
            self._times[index] = self._times[index] + times
            self._took_s[index] = self._took_s[index] + stretch * burst.costs[index] * times
            if times:
                name = self._steps[index].model
                self._switch(name)
                if more := times - (self._streams > 0.0):
                    self._use_weights(self._context.models[name], now, more)
                gap_s = stretch * (last - first) / (times - 1) if times > 1 else 0.0
                ended |= self._advance(index, times, self._step_s + stretch * last, gap_s)
        if run.then:
            self.use.switches += burst.length - 2
        self._streams = 0.0
        self._go_on(burst.length, ended)

    def _use_weights(self, model: SimModel, now: float, times: int) -> tuple[float, int]:
        """Begin `times` steps of a model, and cache what streams.

        Return the share of its weights that is here, and for how many steps this share has held."""
        if self._cache is None:
            return 1.0, times
        cached = self._cache.use(model, now, times)
        before, steps = self._found.get(model.spec.id, (cached, 0))
        found = self._found[model.spec.id] = cached, times + (steps if cached == before else 0)
        return found

    # ---- results of steps -----------------------------------------------------------------------

    def _account(self, took_s: float, steps: int = 1) -> None:
        """Count the time by what set it. A step that took longer than its floor waited for the link
        all along: nothing else would have made it shorter."""
        use = self.use
        use.kv_byte_s += self._book.held_bytes * took_s
        if took_s > steps * self._floor_s * _WAITED and not self._route:
            use.link_s += took_s
        else:
            use.compute_s += took_s * self._compute_share
            use.memory_s += took_s * (1.0 - self._compute_share)

    def _advance(self, index: int, times: int, last_s: float, gap_s: float) -> bool:
        """Count `times` runs of a step, the last one until `last_s`.

        Return whether a sequence has ended."""
        self.use.steps += times
        ended, computed = False, 0
        for part, seq in self._parts[index]:
            tokens = part.tokens * times
            seq.computed += tokens
            computed += tokens
            if part.emits:
                tracked = seq.tracked
                seq.length += times
                before, seq.sampled = seq.sampled, seq.sampled + times
                tracked.receive(times, last_s, gap_s)
                if tracked.sampled == 1:
                    first = ev.FirstToken(part.request_id, tracked.ttft_s)
                    self._context.controller.notify(first)
                if tracked.resumed and before < ev.PROGRESS_TOKENS <= seq.sampled:
                    after_s = last_s - tracked.request.arrival_s
                    self._context.controller.notify(ev.Progressed(part.request_id, after_s))
                if tracked.sampled >= tracked.output:
                    ended = True
        self.use.tokens += computed
        return ended

    def _finish(self) -> None:
        """Notify the policy of the steps of a run, and remove what has ended."""
        now = self._context.timeline.now
        run = self._line.popleft()
        # Several steps are decided at once in slices of one lane alone, which need not know.
        streamed = 0 if run.order else round(self._streamed_bytes)
        self.use.busy_s += now - self._started_s
        for index, step in enumerate(self._steps):
            times, took_s = self._times[index], self._took_s[index]
            outcomes: list[ev.SeqOutcome] = []
            for part, seq in self._parts[index]:
                if times and part.emits:
                    finished = seq.tracked.sampled >= seq.tracked.output
                    outcomes.append(ev.SeqOutcome(part.request_id, times, finished))
                    if finished:
                        self._owner.finished(seq)
            self._owner.step_over(ev.StepDone(step.id, tuple(outcomes), took_s, times, streamed))
        if self._line:
            self._start()

    def _measure_gemms(self, step: Step, took_s: float) -> None:
        network, link = self._context.network, self._h2d[0]
        moved = network.moved_bytes(link) - self._moved_before
        memory = self._memory_bytes / (took_s * self._simulated.hbm_bytes_per_s)
        use = moved / (took_s * network.links[link].bytes_per_s)
        self._owner.step_over(ev.GemmsMeasured(step.model, took_s, min(1.0, memory), min(1.0, use)))
