"""Running steps on a slice: sequences, arena, sampling, parked steps.

The policy decides which sequences run and where their KV lies; the executor knows tokens. It is
given what computes: operators, and an arena in memory that they reach.

    launched   [ step 7 | step 8 ]      collected in this order; step 8 may read step 7's sample
    parked     [ step 5 | step 6 ]      step 6 has requests of step 5 and cannot start before it

A slice may have a second lane (`engine.lanes`), which has launched steps of its own. `submit`
launches a step. Where operators compute inline the step is over at once, else `poll`
collects its sample when that is known. A step that meets weights still loading is parked
(`engine.parked`), and `poll` resumes it.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from c2cserve.core.actions import Drop, ExecutorAction, Fail, Move, Return, RunStep, Truncate
from c2cserve.core.events import MoveDone, StepDone, StepFailed, StepParked
from c2cserve.core.request import Delta, FinishReason, Job
from c2cserve.core.step import Lane, SeqStep, Step
from c2cserve.engine.guides import Guides, LateSample, StepMasks
from c2cserve.engine.lanes import LaneParts, LaneSteps, compute_seconds, lanes_of
from c2cserve.engine.models.decoder import Decoder, ForwardBatch
from c2cserve.engine.moved import MovedBytes, nothing_moved
from c2cserve.engine.parked import Arrived, ParkedSteps
from c2cserve.engine.prefixes import PrefixBlocks
from c2cserve.engine.prompt_logprobs import note_prompt
from c2cserve.engine.report import ExecutorState, Report
from c2cserve.engine.rotation import HostKv, no_copies
from c2cserve.engine.run import Run, Work, pick_rows
from c2cserve.engine.sampled import record_tokens
from c2cserve.engine.sequences import Sequence, build_batch
from c2cserve.engine.step_costs import InlineTimer, StepCosts, StepKind, StepTimer, kind_of
from c2cserve.kernels.ops import Ops, Sample, SampledTokens

log = logging.getLogger(__name__)


class Executor:
    """The `runtime.ports.Executor` of slice actions; its length is the number of requests held. Not
    thread-safe."""

    def __init__(
        self,
        slice_id: str,
        ops: Ops,
        arena: Tensor,
        report: Report,
        clock: Callable[[], float],
        *,
        to_device: Callable[[ForwardBatch], ForwardBatch] | None = None,
        fatal: Callable[[Exception], bool] = lambda _: False,
        renew: Callable[[], None] | None = None,
        host_kv: HostKv | None = None,
        timer: StepTimer | None = None,
        guides: Guides | None = None,
        streaming: LaneParts | None = None,
        moved: Callable[[], MovedBytes] = nothing_moved,
        arrived: Arrived = lambda _: None,
    ) -> None:
        """`arena`: uint8, all of the slice's KV memory. `to_device` moves a batch from the host to
        where the operators read it (None: that is the host).

        An exception for which `fatal` is true is not a step's own. It is raised out of `submit` or
        `poll`, and the executor must not be used again. After any other exception `renew` waits for
        what is launched, and builds anew what operators keep from step to step (None: they keep
        nothing). `host_kv` holds the KV of paused requests, `guides` the grammars of requests.

        `ops`, `to_device` and `timer` (None: steps are over when they are launched) are the
        resident lane's; `streaming` is the other, if there is one. `moved` counts the bytes that
        launches of both move. Steps wait for layers that have not `arrived`, without polls.
        """
        own = LaneParts(ops, to_device, timer=timer or InlineTimer(clock))
        self._lanes = lanes_of(own, streaming)
        self.costs = StepCosts()
        self._moved = moved
        self._slice_id, self._fatal = slice_id, fatal
        self._renew, self._renewals = renew, 0
        self._ops = ops
        self._report, self._clock = report, clock
        self._arena = arena
        self._models: dict[str, Decoder] = {}
        self._seqs: dict[str, Sequence] = {}
        self._parked = ParkedSteps(arrived)
        self.host_kv = HostKv(0, no_copies) if host_kv is None else host_kv
        self.prefixes = PrefixBlocks(self.host_kv.extents, self.host_kv.copier, clock)
        self._guides = Guides() if guides is None else guides

    # ---- models and requests --------------------------------------------------------------------

    def attach(self, model: str, decoder: Decoder) -> None:
        self._models[model] = decoder
        for lane in self._lanes.values():
            lane.parts.attached()

    def detach(self, model: str) -> None:
        self.abandon(model)
        self._models.pop(model, None)

    def abandon(self, model: str) -> None:
        """Let the model's parked steps fail: what they wait for does not come any more."""
        for run in self._parked.take(model):
            run.fail(f"the weights of {model} are here no more")
            self._lanes[run.step.lane].launched.append(run)
            self._collect(self._lanes[run.step.lane])

    def prepare(self, job: Job) -> bool:
        """Begin to prepare a request. Return whether it can be added at once. If not, the state
        after a `poll` has it, or it is to be taken back by `forget`."""
        plain = job.sampling.grammar is None
        return plain or self._guides.prepare(job, self._decoder(job.request.model).config.vocab)

    def forget(self, request_id: str) -> bool:
        """Drop a request that will not be added. Return whether one was being prepared."""
        return self._guides.forget(request_id)

    def add(self, job: Job) -> bool:
        """Add a request. Return whether its next step may be submitted before its last one is done.

        Its first row decides that: later rows need no more, as tokens are banned only at the
        beginning. What this raises is the request's own fault, and nothing of it is held then.
        """
        seq = Sequence.of(job, self._clock())
        if job.sampling.grammar is not None:
            seq.held = self._guides.output(job, self._decoder(job.request.model).config.vocab)
        seq.chained = self._ops.chains(seq.row_sampling())
        self._seqs[job.request.id] = seq
        return seq.chained

    def __len__(self) -> int:
        return len(self._seqs)

    def compute_seconds(self) -> dict[StepKind, float]:
        """Return for how long steps that are over occupied what computes, in all lanes."""
        return compute_seconds(self._lanes.values())

    def lanes_in_flight(self, model: str) -> set[Lane]:
        """Return the lanes in which steps of the model are launched or parked."""
        launched = [run for lane in self._lanes.values() for run in lane.launched]
        steps = (run.step for run in (*launched, *self._parked))
        return {step.lane for step in steps if step.model == model}

    # ---- steps ----------------------------------------------------------------------------------

    def submit(self, action: ExecutorAction) -> None:
        match action:
            case RunStep(step):
                self._start(step)
            case Drop(request_id, requeued):
                if requeued:
                    self.host_kv.forget(request_id)
                else:
                    self._end(request_id)
            case Truncate(request_id):
                self._report(None, [self._seqs[request_id].truncated()])
                self._end(request_id)
            case Fail(request_id, reason):
                self._report(None, [Delta(request_id, finish=FinishReason.ERROR, error=reason)])
                self._end(request_id)
            case Return(request_id):
                self._end(request_id)
            case Move():
                self._move(action)
            case _:
                self.prefixes.submit(action)

    def poll(self) -> ExecutorState:
        """Collect what is done, and resume parked steps. Steps that still wait park again. Return
        how things stand then."""
        self._collect_all(wait=False)
        for move in self.host_kv.finished():
            self._report(MoveDone(move.request_id, move.direction), ())
            if move.request_id not in self._seqs:
                self.host_kv.forget(move.request_id)
        for moved in self.prefixes.finished():
            self._report(moved, ())
        for run, work in self._parked.ready():
            self._advance(run, work)
        computing = any(lane.launched for lane in self._lanes.values())
        awaits_pool, prepared = self._parked.awaits_pool, self._guides.prepared()
        return ExecutorState(computing, awaits_pool, self._renewals, prepared)

    def _move(self, move: Move) -> None:
        seq = self._seqs.get(move.request_id)
        model = None if seq is None else self._models.get(seq.job.request.model)
        if seq is None or model is None:  # it ended, unseen by the policy, or is to be withdrawn
            return self._report(MoveDone(move.request_id, move.direction), ())
        if move.direction == "out":
            seq.block_count = 0
        seq.moved_in |= move.direction == "in"
        return self.host_kv.start(move, model.kv.block_bytes, self.prefixes.runs(move))

    def _end(self, request_id: str) -> None:
        """Hold nothing of a request any more; its copies on the host go at the end of a move."""
        self._seqs.pop(request_id, None)
        if not self.host_kv.busy(request_id):
            self.host_kv.forget(request_id)

    def _start(self, step: Step) -> None:
        lane = self._lanes[step.lane]
        switched = bool(lane.last_model) and lane.last_model != step.model
        lane.last_model = step.model
        run = Run(step, kind_of(step, switched=switched), self._clock(), switched)
        self.costs.steps[run.kind] += 1
        go_on = self._park if self._parked.behind(run) else self._advance
        go_on(run, self._work(run))

    def _park(self, run: Run, work: Work) -> None:
        self._parked.add(run, work)
        if run.parked_since_s is None:
            self._report(StepParked(run.step.id), ())
        run.parked_since_s = self._clock()

    def _work(self, run: Run) -> Work:
        """Do all of a step that can fail. What it raises fails this step alone."""
        lane = self._lanes[run.step.lane].parts
        began_s, collected_s = self._clock(), self.costs.collected_s
        source = self._take_parts(run)
        if not run.parts:
            return SampledTokens([], [])
        decoder = self._decoder(run.step.model)
        batch = build_batch(run.parts, run.seqs)
        if lane.to_device is not None:
            batch = lane.to_device(batch)
        if source is not None:
            batch = replace(batch, ids=lane.ops.chained(batch.ids, source))
        started_s = self._clock()
        collected_s = self.costs.collected_s - collected_s
        self.costs.batch_s[run.kind] += started_s - began_s - collected_s
        run.note_start(started_s)
        masks = StepMasks(self._guides, run, decoder.config.vocab)
        arrived = partial(self._parked.arrived, run)
        logits = yield from decoder.forward(batch, lane.ops, self._arena, arrived)
        return self._sample(run, logits, lane.ops, masks)

    def _decoder(self, model: str) -> Decoder:
        decoder = self._models.get(model)
        if decoder is None:
            raise RuntimeError(f"{model} is not attached to this slice")
        return decoder

    def _take_parts(self, run: Run) -> Tensor | None:
        """Bring the sequences up to date with the policy, and note those that are present.

        Return the tensor to read their unknown tokens from, None if all are known. Where the
        unknown tokens are not all in one sample, wait for them.
        """
        unknown = [
            seq
            for part in run.step.seqs
            if (seq := self._present(part)) is not None and part.start + part.tokens > seq.length
        ]
        sample = unknown[0].sample if unknown else None
        source = None if sample is None else sample.chain
        if unknown and (
            source is None or any(not seq.chained or seq.sample is not sample for seq in unknown)
        ):
            source = None
            self._collect(self._lanes[run.step.lane], wait=True)
        for part in run.step.seqs:
            seq = self._present(part)
            if seq is not None:
                seq.take(part)
                run.parts.append(part)
                run.seqs.append(seq)
        return source

    def _present(self, part: SeqStep) -> Sequence | None:
        """Return the part's request. None: it ended, or a step of it failed, and the policy had not
        seen that. The step runs without it."""
        seq = self._seqs.get(part.request_id)
        return None if seq is None or (seq.lost and not part.fresh) else seq

    def _sample(self, run: Run, logits: Tensor, ops: Ops, masks: StepMasks) -> Sample:
        picked = pick_rows(run, logits)
        sample = masks.sample(ops, picked, run.sampled, self._holds)
        for row, seq in enumerate(run.sampled):
            seq.in_flight += 1
            seq.sample, seq.row = sample, row
        return sample

    def _advance(self, run: Run, work: Work) -> None:
        """Launch the step, or what of it has its weights."""
        lane, moved = self._lanes[run.step.lane], self._moved()
        started_s = self._clock()
        if run.parked_since_s is not None:
            for seq in run.seqs:
                seq.clock.parked_s += started_s - run.parked_since_s
        try:
            whole = self._launch(run, work, lane.parts)
        except Exception as fault:
            if self._fatal(fault):
                raise
            self._collect_all()  # what earlier steps sampled is not lost
            self._survive(run, fault)
            whole = True
        finally:
            run.moved += self._moved() - moved
        if not whole:
            run.compute_s += self._clock() - started_s
            self._park(run, work)
            return
        run.launched_s = started_s
        lane.launched.append(run)
        self._collect(lane)

    def _launch(self, run: Run, work: Work, lane: LaneParts) -> bool:
        """Launch what has its weights, and count the host's time. Return whether that was all."""
        costs, began_s = self.costs, self._clock()
        others_s = costs.batch_s[run.kind] + costs.collected_s
        whole = False
        with lane.current():
            lane.timer.begin(run.kind)
            try:
                run.awaits_pool = bool(next(work))
            except StopIteration as end:
                run.sample, whole = end.value, True
            lane.timer.end()
        others_s = costs.batch_s[run.kind] + costs.collected_s - others_s
        costs.launch_s[run.kind] += self._clock() - began_s - others_s
        return whole

    def _survive(self, run: Run, fault: Exception) -> None:
        """Survive a failed step: neither the slice nor any other step fails with it.

        What the exception may have left half done is built anew before anything else runs. Raises
        what `renew` does.
        """
        log.error("step %d of %s failed", run.step.id, run.step.model, exc_info=fault)
        run.fail(f"{type(fault).__name__}: {fault}")
        if self._renew is not None:
            self._renew()
            self._renewals += 1

    # ---- outcomes -------------------------------------------------------------------------------

    def _collect(self, lane: LaneSteps, *, wait: bool = False) -> None:
        """Complete the lane's steps that are done, in their order; if `wait`, all launched ones."""
        while lane.launched:
            run = lane.launched[0]
            if isinstance(run.sample, LateSample):
                with lane.parts.current():
                    run.sample.launch()  # all steps before it are collected
            if not (wait or run.sample is None or run.sample.done):
                return
            lane.launched.popleft()
            self._complete(run, lane)

    def _collect_all(self, *, wait: bool = True) -> None:
        for lane in self._lanes.values():
            self._collect(lane, wait=wait)

    def _complete(self, run: Run, lane: LaneSteps) -> None:
        tokens: SampledTokens | None = None
        began_s, waits = self._clock(), run.sample is not None and not run.sample.done
        try:
            if run.sample is not None:
                tokens = run.sample.collect()
                for part, seq, logits in run.scored:
                    note_prompt(part, seq, logits)
        except Exception as fault:
            if self._fatal(fault):
                raise
            tokens = None
            self._survive(run, fault)
        now = self._clock()
        if waits:
            self.costs.wait_s += now - began_s
            began_s = now
        # It ran from its launch on, or from the end of what was launched before.
        run.compute_s += now - max(run.launched_s, lane.collected_s)
        lane.collected_s = now
        if run.sample is not None:
            for seq in run.sampled:
                seq.in_flight -= 1
        if tokens is None:
            self._report(StepFailed(run.step.id, run.failed), ())
        else:
            self._report_done(run, tokens)
        self.costs.completion_s[run.kind] += self._clock() - began_s

    def _report_done(self, run: Run, tokens: SampledTokens) -> None:
        for seq in run.seqs:
            seq.clock.compute_s += run.compute_s
        ended = record_tokens(
            run, tokens, self._slice_id, present=self._holds, failure=self._guides.failure
        )
        for request_id in ended:
            self._end(request_id)
        moved = run.moved.streamed, run.moved.peer, run.moved.hbm
        done = StepDone(run.step.id, tuple(run.outcomes), run.compute_s, 1, *moved)
        self._report(done, run.deltas)

    def _holds(self, seq: Sequence) -> bool:  # it may have ended in the step before this one
        return self._seqs.get(seq.job.request.id) is seq
