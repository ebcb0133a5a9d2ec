"""What the sampled tokens of a step mean for its requests: their tokens, deltas and ends."""

from collections.abc import Callable

from c2cserve.core.events import SeqOutcome
from c2cserve.core.request import Delta, FinishReason, TokenLogprob
from c2cserve.engine.run import Run
from c2cserve.engine.sequences import Sequence
from c2cserve.kernels.ops import SampledTokens


def record_tokens(
    run: Run,
    tokens: SampledTokens,
    slice_id: str,
    *,
    present: Callable[[Sequence], bool],
    failure: Callable[[Sequence], str],
) -> list[str]:
    """Record a step's sampled tokens, its deltas and its outcomes. Return the requests that end.

    A request of which `present` is false ended in the step before this one. `failure` says why a
    request got no token. It is empty for one that comes back later: it ends for the slice only."""
    ended: list[str] = []
    for i, (seq, token) in enumerate(zip(run.sampled, tokens.ids, strict=True)):
        if seq.lost or not present(seq):
            continue
        if token < 0:
            _end(run, seq, failure(seq))
            ended.append(seq.job.request.id)
            continue
        logprobs: tuple[TokenLogprob, ...] = ()
        if seq.job.sampling.logprobs is not None:
            top = tuple(tokens.top[i]) if tokens.top else ()
            logprobs = (TokenLogprob(token, tokens.logprobs[i], top),)
        if _take(run, seq, token, logprobs, slice_id):
            ended.append(seq.job.request.id)
    return ended


def _end(run: Run, seq: Sequence, failure: str) -> None:
    request_id = seq.job.request.id
    if failure:
        run.deltas.append(Delta(request_id, finish=FinishReason.ERROR, error=failure))
    run.outcomes.append(SeqOutcome(request_id, 0, finished=True, failed=bool(failure)))


def _take(
    run: Run, seq: Sequence, token: int, logprobs: tuple[TokenLogprob, ...], slice_id: str
) -> bool:
    """Record a sampled token and its delta. Return whether the request ends with it."""
    request = seq.job.request
    seq.tokens[seq.length] = token
    seq.length += 1
    finish: FinishReason | None = None
    if token in seq.job.sampling.stop_token_ids:
        finish = FinishReason.STOP
    elif seq.sampled >= request.max_new_tokens:
        finish = FinishReason.LENGTH
    elif seq.held is not None:
        seq.held.take(token)
    run.deltas.append(seq.delta(token, logprobs, finish, slice_id))
    run.outcomes.append(SeqOutcome(request.id, 1, finish is not None))
    return finish is not None
