"""A request as the executor knows it: its tokens, its block table, how to sample."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from c2cserve.core.request import (
    BLOCK_TOKENS,
    Delta,
    FinishReason,
    Job,
    Timing,
    TokenLogprob,
    blocks_of,
)
from c2cserve.core.step import SeqStep
from c2cserve.engine.models.decoder import ForwardBatch
from c2cserve.grammars.outputs import Held
from c2cserve.kernels.ops import RowSampling, Sample


@dataclass(slots=True)
class FirstTokenClock:
    """The times of a request before its first token, in seconds of the executor's clock."""

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
    """Room for all tokens that may be sampled; the first `length` are known."""
    length: int
    blocks: NDArray[np.int64]
    """Room for all blocks; the first `block_count` are set."""
    clock: FirstTokenClock
    block_count: int = 0
    moved_in: bool = False
    """Its KV came back from the host, and no step has brought its new table yet."""
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    delivered: bool = False
    lost: bool = False
    """A step of it failed. What steps in flight sample for it is not used, until it begins anew."""
    chained: bool = False
    """`Ops.chains` holds for its rows."""
    in_flight: int = 0
    """Tokens that steps sample which are not collected yet."""
    sample: Sample | None = None
    """The sample of the last of these steps, which has the token in its row `row`."""
    row: int = 0
    held: Held | None = None
    """The state of its grammar after the known tokens; None without a grammar."""

    @classmethod
    def of(cls, job: Job, now: float) -> "Sequence":
        request = job.request
        capacity = request.prompt_len + request.max_new_tokens
        tokens = np.empty(capacity, np.int32)
        tokens[: request.prompt_len] = job.tokens
        blocks = np.empty(blocks_of(capacity), np.int64)
        return cls(job, tokens, request.prompt_len, blocks, FirstTokenClock(now))

    @property
    def sampled(self) -> int:
        """Tokens sampled here."""
        return self.length - self.job.request.prompt_len

    @property
    def position(self) -> int:
        """The index of the next output token. Tokens sent before a resume count."""
        return self.job.request.sent + self.sampled + self.in_flight

    def rest(self) -> Job:
        """Return what is left of its request after the tokens that were sampled here."""
        request, count = self.job.request, self.sampled
        left = replace(
            request, prompt_len=self.length, sent=request.sent + count,
            max_new_tokens=request.max_new_tokens - count,
        )  # fmt: skip
        return replace(self.job, request=left, tokens=tuple(self.tokens[: self.length].tolist()))

    def scores_prompt(self, part: SeqStep) -> bool:
        """Return whether the logits of all the step's positions are wanted.

        They are where log-probabilities of prompt tokens are asked for and some of those after
        these positions are missing. A preempted request, which computes its prompt again, has them.
        """
        if self.job.sampling.prompt_logprobs is None or self.job.request.sent:
            return False
        last = min(part.start + part.tokens, self.job.request.prompt_len - 1)
        return len(self.prompt_logprobs) < last

    def take(self, step: SeqStep) -> None:
        """Bring the block table up to date with the policy's."""
        if step.fresh:
            self.block_count = 0
            if not self.sampled and not self.job.request.sent and not self.moved_in:
                self.cached_tokens = step.start
            self.moved_in = self.lost = False
        count = len(step.new_blocks)
        if count:
            self.blocks[self.block_count : self.block_count + count] = step.new_blocks
            self.block_count += count

    def slots(self, first: int, stop: int) -> list[int]:
        """Return the slots of tokens [first, stop): their blocks' offsets * 16 + places in them."""
        if stop - first == 1:
            return [int(self.blocks[first // BLOCK_TOKENS]) * BLOCK_TOKENS + first % BLOCK_TOKENS]
        at = np.arange(first, stop, dtype=np.int64)
        offsets = self.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        slots: list[int] = offsets.tolist()
        return slots

    def delta(
        self,
        token: int,
        logprobs: tuple[TokenLogprob, ...],
        finish: FinishReason | None,
        slice_id: str,
    ) -> Delta:
        """Return what the server gets of a sampled token. The first one says how it came about."""
        request_id = self.job.request.id
        if self.delivered:
            return Delta(request_id, (token,), logprobs, finish=finish)
        self.delivered = True
        return Delta(
            request_id, (token,), logprobs, tuple(self.prompt_logprobs), finish,
            self.cached_tokens, self.clock.timing(slice_id),
        )  # fmt: skip

    def truncated(self) -> Delta:
        """Return the end of a request that does not fit into the slice's KV memory."""
        request_id = self.job.request.id
        if self.position:
            return Delta(request_id, finish=FinishReason.LENGTH)
        reason = f"the prompt's {self.length} tokens do not fit into the slice's KV memory"
        return Delta(request_id, finish=FinishReason.ERROR, error=reason)

    def row_sampling(self) -> RowSampling:
        """Return how to sample the next token."""
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
    """Concatenate the tokens of a step's parts. A token in flight is `-1 - row`, which
    `Ops.chained` replaces out of its sample."""
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
