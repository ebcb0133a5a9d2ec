"""The likeliest token of each row, on the GPU: all that greedy decoding reads of its logits."""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.early import EARLY, after_others

_COLUMNS = 8192


@triton.jit(do_not_specialize=["rows"])
def _greedy_kernel(
    logits, found, rows, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    best = 0
    strange = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocab
        value = tl.load(logits + row * vocab + at, inside, 0.0).to(tl.float32)
        strange += tl.sum((value - value != 0.0).to(tl.int32), 0)
        value = tl.where(inside, value, float("-inf"))
        here, place = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(here > top, start + place, best)
        top_new = tl.maximum(top, here)
        total = total * tl.exp(top - top_new) + tl.sum(tl.exp(value - top_new), 0)
        top = top_new
    tl.store(found + row, tl.where(strange > 0, -1, best))
    tl.store(found + rows + row, (-tl.log(total)).to(tl.int32, bitcast=True))


def greedy(logits: Tensor) -> Tensor:
    """int32 [2, R] of logits [R, V] (contiguous, any float type), to be read back in one copy: the
    id of each row's largest value (the lowest of equal ones; -1 where the row holds a NaN or an
    infinity), and the bits of its log-probability, a float32 (`greedy_of`)."""
    rows, vocab = logits.shape
    found = torch.empty((2, rows), dtype=torch.int32, device=logits.device)
    if rows:
        _greedy_kernel[(rows,)](
            logits.contiguous(), found, rows, vocab, BLOCK=_COLUMNS, num_warps=16, **EARLY
        )
    return found


def greedy_of(found: Tensor) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities out of what `greedy` found, once it is on the host."""
    return found[0].tolist(), found[1].view(torch.float32).tolist()
