"""Log-probabilities of prompt tokens, for the requests that ask for them."""

import torch
from torch import Tensor

from c2cserve.core.request import TokenLogprob
from c2cserve.core.step import SeqStep
from c2cserve.engine.sequences import Sequence

_SCORED_ROWS = 32
"""Prompt positions whose log-probabilities are computed at once: a row is a whole vocabulary."""


def note_prompt(part: SeqStep, seq: Sequence, logits: Tensor) -> None:
    """Note the log-probabilities of the prompt tokens that follow the step's positions.

    Those noted before a preemption are left out.
    """
    wanted = min(seq.job.sampling.prompt_logprobs or 0, logits.shape[1])
    known = len(seq.prompt_logprobs)  # of tokens 1 ... known
    stop = min(part.start + part.tokens, seq.job.request.prompt_len - 1)
    for first in range(max(known, part.start), stop, _SCORED_ROWS):
        last = min(first + _SCORED_ROWS, stop)
        scores = logits[first - part.start : last - part.start].float().cpu().log_softmax(-1)
        top = scores.topk(wanted, -1)
        tokens = torch.from_numpy(seq.tokens[first + 1 : last + 1]).long()
        chosen = scores.gather(1, tokens[:, None])[:, 0].tolist()
        rows = zip(tokens.tolist(), chosen, top.indices.tolist(), top.values.tolist(), strict=True)
        seq.prompt_logprobs += [
            TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
            for token, logprob, ids, values in rows
        ]
