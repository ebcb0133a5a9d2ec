"""Running steps on a CPU slice: sequences, arena, sampling, parked steps.

The policy decides which sequences run and where their KV lies; the executor knows tokens. A step
runs inline in `submit`; one that meets weights still loading is parked and resumed by `poll`.
"""

import logging
import mmap
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from c2cserve.core.actions import Drop, RunStep, SliceAction, Truncate
from c2cserve.core.events import SeqOutcome, SliceEvent, StepDone, StepParked
from c2cserve.core.machine import Slice
from c2cserve.core.request import Delta, FinishReason, Job, Timing, TokenLogprob
from c2cserve.core.step import SeqStep, Step
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.sequences import Sequence, build_batch
from c2cserve.kernels.ops import Ops

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """A step under way."""

    step: Step
    seqs: list[Sequence]
    forward: Generator[list[int], None, Tensor]
    picked_s: float
    switched: bool
    compute_s: float = 0.0
    parked_since_s: float | None = None
    failed: str = ""
    outcomes: list[SeqOutcome] = field(default_factory=list[SeqOutcome])
    deltas: list[Delta] = field(default_factory=list[Delta])


def make_arena(size: int) -> Tensor:
    """Anonymous memory that costs nothing until it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class CpuExecutor:
    """`runtime.ports.Executor` for slice actions, plus what feeds it. Not thread-safe."""

    def __init__(
        self,
        slice_: Slice,
        ops: Ops,
        emit: Callable[[SliceEvent], None],
        deliver: Callable[[list[Delta]], None],
        clock: Callable[[], float],
    ) -> None:
        self._slice_id = slice_.id
        self._ops = ops
        self._emit = emit
        self._deliver = deliver
        self._clock = clock
        self._arena = make_arena(slice_.kv_bytes)
        self._models: dict[str, Decoder] = {}
        self._seqs: dict[str, Sequence] = {}
        self._parked: list[_Run] = []
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

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    def poll(self) -> None:
        """Resume parked steps; those that still wait park again."""
        waiting, self._parked = self._parked, []
        for run in waiting:
            self._advance(run)

    def _start(self, step: Step) -> None:
        picked_s = self._clock()
        decoder = self._models[step.model]
        seqs = [self._seqs[part.request_id] for part in step.seqs]
        for part, seq in zip(step.seqs, seqs, strict=True):
            seq.take(part)
        batch = build_batch(step, seqs)
        switched = bool(self._last_model) and self._last_model != step.model
        self._last_model = step.model
        forward = decoder.forward(batch, self._ops, self._arena)
        run = _Run(step, seqs, forward, picked_s, switched)
        started_s = self._clock()
        for seq in seqs:
            if seq.clock.started_s is None:
                seq.clock.started_s = picked_s
                seq.clock.switched = switched
                seq.clock.switch_s = started_s - picked_s
        self._advance(run)

    def _advance(self, run: _Run) -> None:
        """Run until the end or until weights are missing."""
        started_s = self._clock()
        if run.parked_since_s is not None:
            for seq in run.seqs:
                seq.clock.parked_s += started_s - run.parked_since_s
        first_park = run.parked_since_s is None
        logits: Tensor | None = None
        try:
            next(run.forward)
        except StopIteration as end:
            logits = end.value
        except Exception as fault:
            # Whatever a step does wrong, it fails its own sequences and not the slice.
            log.exception("step %d of %s failed", run.step.id, run.step.model)
            run.failed = f"{type(fault).__name__}: {fault}"
        now = self._clock()
        run.compute_s += now - started_s
        if logits is None and not run.failed:
            run.parked_since_s = now
            self._parked.append(run)
            if first_park:
                self._emit(StepParked(run.step.id))
            return
        self._complete(run, logits)

    def _complete(self, run: _Run, logits: Tensor | None) -> None:
        drawing_s = self._clock()
        if logits is None:
            for seq in run.seqs:
                self._fail(run, seq, run.failed)
        else:
            self._draw(run, logits)
        run.compute_s += self._clock() - drawing_s
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

    def _draw(self, run: _Run, logits: Tensor) -> None:
        drawing: list[Sequence] = []
        rows: list[int] = []
        row = 0
        for part, seq in zip(run.step.seqs, run.seqs, strict=True):
            seq.clock.compute_s += run.compute_s
            if seq.wants_prompt_logprobs:
                self._note_prompt(part, seq, logits[row : row + part.tokens])
                row += part.tokens
            elif part.emits:
                row += 1
            if part.emits:
                drawing.append(seq)
                rows.append(row - 1)
        if not drawing:
            return
        picked = logits if len(rows) == len(logits) else logits[rows]
        drawn = self._ops.sample(picked, [seq.row_sampling() for seq in drawing])
        for i, (seq, token) in enumerate(zip(drawing, drawn.ids, strict=True)):
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
        """Log-probabilities of the prompt tokens that follow the step's positions."""
        wanted = seq.job.sampling.prompt_logprobs or 0
        prompt_len = seq.job.request.prompt_len
        known = [p + 1 for p in range(part.start, part.start + part.tokens) if p + 1 < prompt_len]
        if not known:
            return
        scores = logits[: len(known)].log_softmax(-1)
        top = scores.topk(wanted, -1) if wanted else None
        for i, position in enumerate(known):
            token = int(seq.tokens[position])
            best: tuple[tuple[int, float], ...] = ()
            if top is not None:
                ids, values = top.indices[i].tolist(), top.values[i].tolist()
                best = tuple(zip(ids, values, strict=True))
            seq.prompt_logprobs.append(TokenLogprob(token, float(scores[i, token]), best))
