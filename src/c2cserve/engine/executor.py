"""Running steps on a slice: sequences, arena, sampling, parked steps.

The policy decides which sequences run and where their KV lies; the executor knows tokens. What
computes is given to it: operators, and an arena in memory they reach. A step runs inline in
`submit`; one that meets weights still loading is parked and resumed by `poll`.
"""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from c2cserve.core.actions import Drop, Move, RunStep, SetAlpha, SliceAction, Truncate
from c2cserve.core.events import SeqOutcome, SliceEvent, StepDone, StepParked
from c2cserve.core.request import Delta, FinishReason, Job, Timing, TokenLogprob
from c2cserve.core.step import SeqStep, Step
from c2cserve.engine.models.decoder import Decoder, ForwardBatch
from c2cserve.engine.sequences import Sequence, build_batch
from c2cserve.kernels.ops import Drawn, Ops

log = logging.getLogger(__name__)

_SCORED_ROWS = 32
"""Prompt positions whose log-probabilities are computed at once: a row is a whole vocabulary."""


_Work = Generator[list[int], None, Drawn]
"""A step from building its batch to drawing its tokens; yields when weights are missing."""


@dataclass(slots=True)
class _Run:
    """A step under way."""

    step: Step
    seqs: list[Sequence]
    picked_s: float
    switched: bool
    drawing: list[Sequence] = field(default_factory=list[Sequence])
    """Those whose tokens were drawn, in the order of the rows."""
    compute_s: float = 0.0
    parked_since_s: float | None = None
    failed: str = ""
    outcomes: list[SeqOutcome] = field(default_factory=list[SeqOutcome])
    deltas: list[Delta] = field(default_factory=list[Delta])


class Executor:
    """`runtime.ports.Executor` for slice actions, plus what feeds it. Not thread-safe."""

    def __init__(
        self,
        slice_id: str,
        ops: Ops,
        arena: Tensor,
        emit: Callable[[SliceEvent], None],
        deliver: Callable[[list[Delta]], None],
        clock: Callable[[], float],
        *,
        place: Callable[[ForwardBatch], ForwardBatch] | None = None,
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        """`arena`: uint8, all of the slice's KV memory. `place` moves a batch, made on the host,
        to where the operators read it (None: that is the host). A `fatal` exception is not a
        step's own: it is raised out of `submit` or `poll`, and the executor is not to be used
        again."""
        self._slice_id = slice_id
        self._place = place
        self._fatal = fatal
        self._ops = ops
        self._emit = emit
        self._deliver = deliver
        self._clock = clock
        self._arena = arena
        self._models: dict[str, Decoder] = {}
        self._seqs: dict[str, Sequence] = {}
        self._parked: list[tuple[_Run, _Work]] = []
        self._last_model = ""

    # ---- models and requests --------------------------------------------------------------------

    def attach(self, model: str, decoder: Decoder) -> None:
        self._models[model] = decoder

    def detach(self, model: str) -> None:
        self._models.pop(model, None)

    def add(self, job: Job) -> None:
        self._seqs[job.request.id] = Sequence.of(job, self._clock())

    def __len__(self) -> int:
        """Requests held."""
        return len(self._seqs)

    # ---- steps ----------------------------------------------------------------------------------

    def submit(self, action: SliceAction) -> None:
        match action:
            case RunStep(step):
                self._start(step)
            case Drop(request_id, requeued):
                if not requeued:
                    self._seqs.pop(request_id, None)
            case Truncate(request_id):
                self._truncate(self._seqs.pop(request_id))
            case Move() | SetAlpha():
                raise TypeError(f"no live slice rotates KV or splits GEMMs: {action}")

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    def poll(self) -> None:
        """Resume parked steps; those that still wait park again."""
        waiting, self._parked = self._parked, []
        for run, work in waiting:
            self._advance(run, work)

    def _start(self, step: Step) -> None:
        picked_s = self._clock()
        seqs = [self._seqs[part.request_id] for part in step.seqs]
        for part, seq in zip(step.seqs, seqs, strict=True):
            seq.take(part)
        switched = bool(self._last_model) and self._last_model != step.model
        self._last_model = step.model
        run = _Run(step, seqs, picked_s, switched)
        self._advance(run, self._work(run))

    def _work(self, run: _Run) -> _Work:
        """All of a step that can fail: whatever it raises fails the step's sequences alone."""
        step, seqs = run.step, run.seqs
        decoder = self._models.get(step.model)
        if decoder is None:
            raise RuntimeError(f"{step.model} is not attached to this slice")
        batch = build_batch(step, seqs)
        if self._place is not None:
            batch = self._place(batch)
        started_s = self._clock()
        for seq in seqs:
            if seq.clock.started_s is None:
                seq.clock.started_s = run.picked_s
                seq.clock.switched = run.switched
                seq.clock.switch_s = started_s - run.picked_s
        logits = yield from decoder.forward(batch, self._ops, self._arena)
        rows: list[int] = []
        row = 0
        for part, seq in zip(step.seqs, seqs, strict=True):
            if seq.scores_prompt(part):
                self._note_prompt(part, seq, logits[row : row + part.tokens])
                row += part.tokens
            elif part.emits:
                row += 1
            if part.emits:
                run.drawing.append(seq)
                rows.append(row - 1)
        picked = logits if len(rows) == logits.shape[0] else logits[rows]
        return self._ops.sample(picked, [seq.row_sampling() for seq in run.drawing])

    def _advance(self, run: _Run, work: _Work) -> None:
        """Run until the end or until weights are missing."""
        started_s = self._clock()
        first_time = run.parked_since_s is None
        if run.parked_since_s is not None:
            for seq in run.seqs:
                seq.clock.parked_s += started_s - run.parked_since_s
        drawn: Drawn | None = None
        try:
            next(work)
        except StopIteration as end:
            drawn = end.value
        except self._fatal:
            raise
        except Exception as fault:
            # Whatever a step does wrong, it fails its own sequences and not the slice.
            log.exception("step %d of %s failed", run.step.id, run.step.model)
            run.failed = f"{type(fault).__name__}: {fault}"
        now = self._clock()
        run.compute_s += now - started_s
        if drawn is None and not run.failed:
            run.parked_since_s = now
            self._parked.append((run, work))
            if first_time:
                self._emit(StepParked(run.step.id))
            return
        self._complete(run, drawn)

    def _complete(self, run: _Run, drawn: Drawn | None) -> None:
        if drawn is None:
            for seq in run.seqs:
                self._fail(run, seq, run.failed)
        else:
            for seq in run.seqs:
                seq.clock.compute_s += run.compute_s
            self._record(run, drawn)
        if run.deltas:
            self._deliver(run.deltas)
        self._emit(StepDone(run.step.id, tuple(run.outcomes), run.compute_s))

    def _fail(self, run: _Run, seq: Sequence, reason: str) -> None:
        request_id = seq.job.request.id
        run.deltas.append(Delta(request_id, finish=FinishReason.ERROR, error=reason))
        run.outcomes.append(SeqOutcome(request_id, 0, finished=True, failed=True))
        self._seqs.pop(request_id, None)

    def _truncate(self, seq: Sequence) -> None:
        request_id = seq.job.request.id
        if seq.position:
            delta = Delta(request_id, finish=FinishReason.LENGTH)
        else:
            reason = f"the prompt's {seq.length} tokens do not fit into the slice's KV memory"
            delta = Delta(request_id, finish=FinishReason.ERROR, error=reason)
        self._deliver([delta])

    # ---- drawing --------------------------------------------------------------------------------

    def _record(self, run: _Run, drawn: Drawn) -> None:
        for i, (seq, token) in enumerate(zip(run.drawing, drawn.ids, strict=True)):
            if token < 0:
                self._fail(run, seq, "the model computed values that are not numbers")
                continue
            logprobs: tuple[TokenLogprob, ...] = ()
            if seq.job.sampling.logprobs is not None:
                top = tuple(drawn.top[i]) if drawn.top else ()
                logprobs = (TokenLogprob(token, drawn.logprobs[i], top),)
            self._take(run, seq, token, logprobs)

    def _take(
        self, run: _Run, seq: Sequence, token: int, logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        """Record a drawn token and say so."""
        request = seq.job.request
        seq.tokens[seq.length] = token
        seq.length += 1
        finish: FinishReason | None = None
        if token in seq.job.sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif seq.drawn >= request.max_new_tokens:
            finish = FinishReason.LENGTH
        if seq.delivered:
            delta = Delta(request.id, (token,), logprobs, finish=finish)
        else:
            seq.delivered = True
            delta = Delta(
                request.id, (token,), logprobs, tuple(seq.prompt_logprobs), finish,
                seq.cached_tokens, self._timing(seq),
            )  # fmt: skip
        run.deltas.append(delta)
        run.outcomes.append(SeqOutcome(request.id, 1, finish is not None))
        if finish is not None:
            del self._seqs[request.id]

    def _timing(self, seq: Sequence) -> Timing:
        clock = seq.clock
        started_s = clock.added_s if clock.started_s is None else clock.started_s
        return Timing(
            self._slice_id, clock.switched, started_s - clock.added_s, clock.switch_s,
            clock.parked_s, clock.compute_s,
        )  # fmt: skip

    @staticmethod
    def _note_prompt(part: SeqStep, seq: Sequence, logits: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow the step's positions, those noted
        before a preemption left out."""
        wanted = min(seq.job.sampling.prompt_logprobs or 0, logits.shape[1])
        known = len(seq.prompt_logprobs)  # of tokens 1 ... known
        stop = min(part.start + part.tokens, seq.job.request.prompt_len - 1)
        for first in range(max(known, part.start), stop, _SCORED_ROWS):
            last = min(first + _SCORED_ROWS, stop)
            scores = logits[first - part.start : last - part.start].float().cpu().log_softmax(-1)
            top = scores.topk(wanted, -1)
            tokens = torch.from_numpy(seq.tokens[first + 1 : last + 1]).long()
            chosen = scores.gather(1, tokens[:, None])[:, 0].tolist()
            rows = zip(
                tokens.tolist(), chosen, top.indices.tolist(), top.values.tolist(), strict=True
            )
            seq.prompt_logprobs += [
                TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
                for token, logprob, ids, values in rows
            ]
