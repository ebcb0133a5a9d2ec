"""What the executor keeps of a request: its tokens, its block table, how to sample."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from c2cserve.core.request import BLOCK_TOKENS, Job, Timing, TokenLogprob
from c2cserve.core.step import SeqStep
from c2cserve.engine.models.decoder import ForwardBatch
from c2cserve.kernels.ops import Draw, RowSampling


@dataclass(slots=True)
class Clockwork:
    """When things happened to a request before its first token, seconds of the executor's clock."""

    added_s: float
    started_s: float | None = None
    switched: bool = False
    switch_s: float = 0.0
    parked_s: float = 0.0
    compute_s: float = 0.0

    def timing(self, slice_id: str) -> Timing:
        started_s = self.added_s if self.started_s is None else self.started_s
        return Timing(
            slice_id, self.switched, started_s - self.added_s, self.switch_s, self.parked_s,
            self.compute_s,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Sequence:
    job: Job
    tokens: NDArray[np.int32]
    """Capacity for everything that may be drawn; the first `length` are known."""
    length: int
    blocks: NDArray[np.int64]
    """Capacity for all of them; the first `block_count` are set."""
    clock: Clockwork
    block_count: int = 0
    moved_in: bool = False
    """Its KV came back from the host, and the step that tells its new table has not come yet."""
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    delivered: bool = False
    lost: bool = False
    """A step of it failed: what steps in flight draw for it is in vain, until it begins anew."""
    chained: bool = False
    """Its rows are such that `Ops.chains`."""
    drawing: int = 0
    """Tokens being drawn by steps that are not collected yet."""
    draw: Draw | None = None
    """Of the last of them, in its row `row`."""
    row: int = 0

    @classmethod
    def of(cls, job: Job, now: float) -> "Sequence":
        request = job.request
        capacity = request.prompt_len + request.max_new_tokens
        tokens = np.empty(capacity, np.int32)
        tokens[: request.prompt_len] = job.tokens
        blocks = np.empty(-(-capacity // BLOCK_TOKENS), np.int64)
        return cls(job, tokens, request.prompt_len, blocks, Clockwork(now))

    @property
    def drawn(self) -> int:
        """Tokens drawn here."""
        return self.length - self.job.request.prompt_len

    @property
    def position(self) -> int:
        """Index of the next output token to be drawn, those sent before a resume included."""
        return self.job.request.sent + self.drawn + self.drawing

    def scores_prompt(self, part: SeqStep) -> bool:
        """Whether the logits of all the step's positions are wanted: log-probabilities of prompt
        tokens are asked for, and some of those that follow these positions are not known yet (a
        preempted request computes its prompt again)."""
        if self.job.sampling.prompt_logprobs is None or self.job.request.sent:
            return False
        last = min(part.start + part.tokens, self.job.request.prompt_len - 1)
        return len(self.prompt_logprobs) < last

    def take(self, step: SeqStep) -> None:
        """Bring the block table up to date with the policy's."""
        if step.fresh:
            self.block_count = 0
            if not self.drawn and not self.job.request.sent and not self.moved_in:
                self.cached_tokens = step.start
            self.moved_in = self.lost = False
        count = len(step.new_blocks)
        if count:
            self.blocks[self.block_count : self.block_count + count] = step.new_blocks
            self.block_count += count

    def slots(self, first: int, stop: int) -> list[int]:
        """Where tokens [first, stop) lie: their blocks' offsets * 16 + places in them."""
        if stop - first == 1:
            return [int(self.blocks[first // BLOCK_TOKENS]) * BLOCK_TOKENS + first % BLOCK_TOKENS]
        at = np.arange(first, stop, dtype=np.int64)
        offsets = self.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        slots: list[int] = offsets.tolist()
        return slots

    def row_sampling(self) -> RowSampling:
        sampling, request = self.job.sampling, self.job.request
        output_start = request.prompt_len - request.sent
        penalized = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        known = torch.from_numpy(self.tokens[: self.length]) if penalized else None
        bias = sampling.logit_bias
        banned = sampling.stop_token_ids if self.position < sampling.min_tokens else ()
        return RowSampling(
            seed=sampling.seed,
            position=self.position,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            prompt=None if known is None else known[:output_start],
            output=None if known is None else known[output_start:],
            bias_ids=torch.tensor([i for i, _ in bias], dtype=torch.int32) if bias else None,
            bias=torch.tensor([b for _, b in bias]) if bias else None,
            banned=torch.tensor(banned, dtype=torch.int32) if banned else None,
            top_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        )


def build_batch(parts: list[SeqStep], seqs: list[Sequence]) -> ForwardBatch:
    """The tokens of a step's parts, concatenated. One that is still being drawn is `-1 - row`, to
    be read from its draw by `Ops.chained`."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    context: list[int] = []
    rows: list[int] = []
    table = np.zeros((len(seqs), max(seq.block_count for seq in seqs)), np.int64)
    for part, seq, blocks in zip(parts, seqs, table, strict=True):
        first, stop = part.start, part.start + part.tokens
        begin, end = starts[-1], starts[-1] + part.tokens
        ids += seq.tokens[first : min(stop, seq.length)].tolist()
        if stop > seq.length:
            ids.append(-1 - seq.row)
        positions += range(first, stop)
        slots += seq.slots(first, stop)
        starts.append(end)
        context.append(stop)
        blocks[: seq.block_count] = seq.blocks[: seq.block_count]
        if seq.scores_prompt(part):
            rows += range(begin, end)
        elif part.emits:
            rows.append(end - 1)
    return ForwardBatch(
        ids=_ints(ids),
        positions=_ints(positions),
        q_start=_ints(starts),
        context_len=_ints(context),
        block_table=torch.from_numpy(table),
        slots=_longs(slots),
        logit_rows=_longs(rows),
        longest=max(context),
    )


def _ints(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32))


def _longs(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))
