"""Random sampling on the GPU: temperature, min-p, top-k and top-p, with the CPU's random stream.

    logits, falling    9.1  8.7 | 8.2  8.2  8.2 | 7.9  ...
    border 8.2                    ties: 2 of 3
    kept               9.1  8.7   8.2  8.2

Every filter keeps the first tokens in the order of falling logits, and of rising ids among equal
ones. So a border describes what is kept: all logits above it, and the first few that equal it.
Bisection over the ordered bit patterns of logits finds the border, in one pass over the row for
each bit. Then a token is sampled by the running sum of the kept weights, in the order of ids, as in
`kernels/cpu/sample.h`.
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: N803

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.sampling.masks import RowMasks, allowed
from c2cserve.kernels.ops import RowSampling

_COLUMNS = 8192
_U64 = (1 << 64) - 1
_FLOAT_MAX = float(np.finfo(np.float32).max)
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""The low bits of a float32 that are 0 for every number of this type."""


# ---- device code --------------------------------------------------------------------------------


@triton.jit
def _share(seed, position):
    """Return a random number in [0, 1), float64 of 53 random bits.

    It is Philox 4x32-10 (Salmon et al., SC 2011) of (seed, position), as in `kernels/cpu/sample.h`.
    """
    zero = (position * 0).to(tl.uint32)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed.to(tl.uint64), low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) ^ (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _ordered(value, SHIFT: tl.constexpr):
    """Return int64 numbers in the order of the float32 numbers."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT).to(tl.int64)


@triton.jit
def _number(order, SHIFT: tl.constexpr):
    """Return the float32 for which `_ordered` gives `order`."""
    bits = (order << SHIFT).to(tl.int32)
    bits = tl.where(order < 0, (bits + (2**SHIFT - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(value, peak, scale, min_p):
    """Return e^((logit - peak) / temperature), or 0 for what min-p leaves out."""
    weight = tl.exp((value - peak) * scale)
    return tl.where(weight < min_p, 0.0, weight)


@triton.jit
def _held(
    logits, vocab, least, peak, scale, min_p, nothing, bits, place, words,
    MASKED: tl.constexpr, COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the weight, or with COUNT the number, of tokens with `_ordered` of at least `least`.
    It is a float64."""
    total = nothing
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + at, at < vocab, float("-inf")).to(tl.float32)
        if MASKED:
            value = allowed(value, bits, place, at, words)
        weight = _weight(value, peak, scale, min_p)
        if COUNT:
            weight = tl.where(weight > 0.0, 1.0, 0.0)
        inside = (at < vocab) & (_ordered(value, SHIFT) >= least)
        total += tl.sum(tl.where(inside, weight, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _border(
    logits, vocab, limit, lowest, peak, scale, min_p, nothing, bits, place, words,
    MASKED: tl.constexpr, COUNT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the greatest order such that the tokens from it on reach `limit`, and what the tokens
    above it reach. The order is at least `lowest`."""
    low, high = lowest, _ordered(peak, SHIFT)
    above = nothing
    while low < high:
        middle = low + (high - low + 1) // 2
        held = _held(
            logits, vocab, middle, peak, scale, min_p, nothing, bits, place, words, MASKED, COUNT,
            SHIFT, BLOCK,
        )  # fmt: skip
        if held >= limit:
            low = middle
        else:
            high = middle - 1
            above = held
    return low, above


@triton.jit
def _pick(
    logits, vocab, target, border, ties, peak, scale, min_p, nothing, bits, place, words,
    MASKED: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token at which the sum of kept weights, added in order of ids, passes `target`."""
    chosen, last, seen = -1, 0, 0
    mass = nothing
    start = 0
    while (start < vocab) & (chosen < 0):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + at, at < vocab, float("-inf")).to(tl.float32)
        if MASKED:
            value = allowed(value, bits, place, at, words)
        order = _ordered(value, SHIFT)
        equal = ((at < vocab) & (order == border)).to(tl.int32)
        before = seen + tl.cumsum(equal, 0) - equal
        kept = (at < vocab) & ((order > border) | ((equal > 0) & (before < ties)))
        weight = tl.where(kept, _weight(value, peak, scale, min_p), 0.0)
        up_to = mass + tl.cumsum(weight, 0).to(tl.float64)
        hit = tl.where((weight > 0.0) & (up_to > target), at, vocab)
        first = tl.min(hit, 0)
        chosen = tl.where(first < vocab, first, -1)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0))
        seen += tl.sum(equal, 0)
        mass += tl.sum(weight, 0).to(tl.float64)
        start += BLOCK
    # Rounding may leave a little of the target. Then the last token with a weight is taken.
    return tl.where(chosen < 0, last, chosen)


@triton.jit
def _sampled(
    logits, vocab, share, top_k, top_p, most, scale, min_p, nothing, bits, place, words,
    MASKED: tl.constexpr, LOWEST: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a token of those that the filters keep, at `share` of their weight. `most`: the
    largest allowed logit."""
    border = place * 0 + LOWEST
    ties = nothing + vocab
    mass = _held(
        logits, vocab, border, most, scale, min_p, nothing, bits, place, words, MASKED, False,
        SHIFT, BLOCK,
    )  # fmt: skip
    if (top_k > 0.0) & (top_k < vocab):
        border, above = _border(
            logits, vocab, top_k, border, most, scale, min_p, nothing, bits, place, words,
            MASKED, True, SHIFT, BLOCK,
        )  # fmt: skip
        ties = top_k - above
        one = _weight(_number(border, SHIFT), most, scale, min_p).to(tl.float64)
        mass = _held(
            logits, vocab, border + 1, most, scale, min_p, nothing, bits, place, words, MASKED,
            False, SHIFT, BLOCK,
        )  # fmt: skip
        there = _held(
            logits, vocab, border, most, scale, min_p, nothing, bits, place, words, MASKED,
            True, SHIFT, BLOCK,
        )  # fmt: skip
        # If fewer than top-k tokens have a weight, no logit is at the border, and `one` is NaN.
        mass += tl.where(there > above, tl.minimum(ties, there - above) * one, nothing)
    if top_p < 1.0:
        limit = top_p * mass
        lowest = border
        border, above = _border(
            logits, vocab, limit, lowest, most, scale, min_p, nothing, bits, place, words,
            MASKED, False, SHIFT, BLOCK,
        )  # fmt: skip
        one = _weight(_number(border, SHIFT), most, scale, min_p).to(tl.float64)
        most_ties = tl.where(border == lowest, ties, nothing + vocab)
        ties = tl.minimum(most_ties, tl.maximum(tl.ceil((limit - above) / one), 1.0))
        mass = above + ties * one
    return _pick(
        logits, vocab, share * mass, border, ties, most, scale, min_p, nothing, bits, place,
        words, MASKED, SHIFT, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "words"])
def _sample_kernel(
    logits, asked, found, masks, places, rows, vocab, words, MASKED: tl.constexpr,
    LOWEST: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    share = _share(tl.load(asked + row), tl.load(asked + rows + row))
    scale = tl.load(asked + 2 * rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(asked + 3 * rows + row).to(tl.float64, bitcast=True)
    min_p = tl.load(asked + 4 * rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    top_k = tl.load(asked + 5 * rows + row).to(tl.float64, bitcast=True)
    nothing = share * 0.0
    bits, place = masks, row * 0
    if MASKED:
        place = tl.load(places + row).to(tl.int64)
        bits = masks + place * words

    top = float("-inf")
    most = float("-inf")
    total = 0.0
    chosen = 0
    strange = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + at, at < vocab, 0.0).to(tl.float32)
        strange += tl.sum((value - value != 0.0).to(tl.int32), 0)
        value = tl.where(at < vocab, value, float("-inf"))
        here, best = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        top_new = tl.maximum(top, here)
        total = total * tl.exp(top - top_new) + tl.sum(tl.exp(value - top_new), 0)
        top = top_new
        if MASKED:
            value = allowed(value, bits, place, at, words)
            here, best = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.where(here > most, start + best, chosen)
        most = tl.maximum(most, here)
    strange += (most == float("-inf")).to(tl.int32)

    if (scale > 0.0) & (strange == 0):
        chosen = _sampled(
            logits, vocab, share, top_k, top_p, most, scale, min_p, nothing, bits, place, words,
            MASKED, LOWEST, SHIFT, BLOCK,
        )  # fmt: skip
    tl.store(found + row, tl.where(strange > 0, -1, chosen))
    logprob = tl.load(logits + chosen).to(tl.float32) - top - tl.log(total)
    tl.store(found + rows + row, logprob.to(tl.int32, bitcast=True))


# ---- host code ----------------------------------------------------------------------------------


def sample(logits: Tensor, asked: Tensor, only: RowMasks | None = None) -> Tensor:
    """Sample an allowed token for each row of logits [R, V], contiguous and of any float type.
    `only`: the tokens that are allowed; None allows all.

        [0]  the sampled id
        [1]  its log-probability by the unfiltered logits: the bits of a float32

    The result is int32 [2, R], as that of `greedy.greedy`. The id is -1 if the row holds a NaN or
    an infinity, or allows no token. `asked`: the result of `asked_of`, on the GPU.
    """
    rows, vocab = logits.shape
    found = torch.empty((2, rows), dtype=torch.int32, device=logits.device)
    shift = _SHIFT[logits.dtype]
    if rows:
        # Without masks these are not read.
        masks, places, words = found, found, 0
        if only is not None:
            masks, places, words = only.masks, only.places, only.masks.shape[1]
        _sample_kernel[(rows,)](
            logits.contiguous(), asked, found, masks, places, rows, vocab, words,
            MASKED=only is not None, LOWEST=-(1 << (31 - shift)), SHIFT=shift,
            BLOCK=_COLUMNS, num_warps=16,
        )  # fmt: skip
    return found


def asked_of(rows: Sequence[RowSampling]) -> Tensor:
    """Return the rows' parameters as int64 [6, R] on the host.

    [0, 1]  seed, position
    [2..5]  1 / temperature (0: the likeliest), top-p, min-p, top-k (0: all): bits of float64
    """
    asked = np.empty((6, len(rows)), np.int64)
    asked[0] = np.array([row.seed & _U64 for row in rows], np.uint64).view(np.int64)
    asked[1] = [row.position for row in rows]
    numbers = asked[2:].view(np.float64)
    numbers[0] = [_scale(row.temperature) for row in rows]
    numbers[1] = [row.top_p for row in rows]
    numbers[2] = [min(row.min_p, 1.0) for row in rows]
    numbers[3] = [row.top_k for row in rows]
    return torch.from_numpy(asked)


def _scale(temperature: float) -> float:
    if temperature <= 0.0:
        return 0.0
    return min(1.0 / temperature, _FLOAT_MAX)
