"""The likeliest token of each row, on the GPU. Greedy decoding reads nothing else of the logits."""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.launcher import Launcher
from c2cserve.kernels.gpu.programmatic_launch import after_others
from c2cserve.kernels.gpu.sampling.masks import RowMasks, allowed

_COLUMNS = 4096
"""The part of a row that one program reads. A whole row would take it longer than a layer's GEMMs.
"""
_MERGED = 64
"""The number of parts that are merged at once."""


@triton.jit(do_not_specialize=["words"])
def _part_kernel(
    logits, tops, totals, bests, allowed_tops, masks, places, vocab, words,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    value = tl.load(logits + row * vocab + at, inside, 0.0).to(tl.float32)
    strange = tl.sum((value - value != 0.0).to(tl.int32), 0)
    value = tl.where(inside, value, float("-inf"))
    top, place = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + part
    tl.store(tops + out, top)
    tl.store(totals + out, tl.sum(tl.exp(value - top), 0))
    if MASKED:
        place = tl.load(places + row).to(tl.int64)
        value = allowed(value, masks + place * words, place, at, words)
        top, place = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(allowed_tops + out, top)
    tl.store(bests + out, tl.where(strange > 0, -1, part * BLOCK + place))


@triton.jit(do_not_specialize=["rows", "parts"])
def _whole_kernel(
    tops, totals, bests, allowed_tops, found, rows, parts, MASKED: tl.constexpr,
    MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    most = float("-inf")
    total = 0.0
    best = 0
    strange = 0
    for start in range(0, parts, MERGED):
        at = start + tl.arange(0, MERGED)
        inside = at < parts
        some = tl.load(tops + row * parts + at, inside, float("-inf"))
        ids = tl.load(bests + row * parts + at, inside, 0)
        strange += tl.sum((ids < 0).to(tl.int32), 0)
        here, place = tl.max(some, 0, return_indices=True, return_indices_tie_break_left=True)
        top_new = tl.maximum(top, here)
        there = here
        if MASKED:
            free = tl.load(allowed_tops + row * parts + at, inside, float("-inf"))
            there, place = tl.max(free, 0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.sum(tl.where(at == start + place, ids, 0), 0)
        best = tl.where(there > most, chosen, best)
        most = tl.maximum(most, there)
        more = tl.load(totals + row * parts + at, inside, 0.0)
        total = total * tl.exp(top - top_new) + tl.sum(more * tl.exp(some - top_new), 0)
        top = top_new
    logprob = -tl.log(total)
    if MASKED:
        strange += (most == float("-inf")).to(tl.int32)
        # The bits of a row without a mask are those it has where no row has one.
        logprob = tl.where(most == top, logprob, most - top + logprob)
    tl.store(found + row, tl.where(strange > 0, -1, best))
    tl.store(found + rows + row, logprob.to(tl.int32, bitcast=True))


def greedy(logits: Tensor, only: RowMasks | None = None) -> Tensor:
    """Find the likeliest allowed token of each row of logits [R, V], contiguous and of any float
    type. `only`: the tokens that are allowed; None allows all.

        [0]  the id of the row's largest value, the lowest id of equal ones
        [1]  its log-probability, by all of the row's logits: the bits of a float32

    The result is int32 [2, R], for one copy to the host, where `greedy_of` reads it. The id is -1
    if the row holds a NaN or an infinity, or allows no token.
    """
    (rows, vocab), device = logits.shape, logits.device
    found = torch.empty((2, rows), dtype=torch.int32, device=device)
    if rows:
        parts = -(-vocab // _COLUMNS)
        tops, totals = torch.empty((2, rows, parts), dtype=torch.float32, device=device)
        bests = torch.empty((rows, parts), dtype=torch.int32, device=device)
        # Without masks these are not read.
        masks, places, words, free = bests, bests, 0, tops
        if only is not None:
            masks, places, words = only.masks, only.places, only.masks.shape[1]
            free = torch.empty_like(tops)
        masked = only is not None
        partial = (tops, totals, bests, free)
        _launch_part(
            (rows, parts, 1), (logits.contiguous(), *partial, masks, places), (vocab, words),
            (logits.dtype, vocab, masked),
        )  # fmt: skip
        _launch_whole((rows, 1, 1), (*partial, found), (rows, parts), (masked,))
    return found


def _part_constants(_dtype: torch.dtype, _vocab: int, masked: bool) -> dict[str, Any]:
    return {"MASKED": masked, "BLOCK": _COLUMNS, "num_warps": 8}


def _whole_constants(masked: bool) -> dict[str, Any]:
    return {"MASKED": masked, "MERGED": _MERGED, "num_warps": 2}


_launch_part = Launcher(_part_kernel, _part_constants)
_launch_whole = Launcher(_whole_kernel, _whole_constants)


def greedy_of(found: Tensor) -> tuple[list[int], list[float]]:
    """Return ids and log-probabilities from the result of `greedy`, once it is on the host."""
    return found[0].tolist(), found[1].view(torch.float32).tolist()
