"""Masks of the tokens that rows may sample, on the GPU: grammars, for instance, allow few.

masks    [M, ceil(V / 32)]   a bit for each token, of the rows that have one
places   [R]                 where a row's mask is; -1 for rows without, which read no mask
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ALIGNED = 4
"""Kernels are compiled for pointers at multiples of so many int32."""


@triton.jit
def allowed(value, bits, place, at, words):
    """Return the logits `at` some tokens, minus infinity where the mask leaves one out.

    `bits`: the row's mask of so many words. It is read if `place` is not negative.
    """
    word = tl.load(bits + at // 32, (at // 32 < words) & (place >= 0), -1)
    return tl.where(((word >> (at % 32)) & 1) != 0, value, float("-inf"))


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of a sample's rows."""

    masks: Tensor
    """int32 [M, ceil(V / 32)]: bit v % 32 of word v // 32 says whether token v is allowed."""
    places: Tensor
    """int32 [R]: the place of each row's mask, -1 if all of its tokens are allowed."""

    @classmethod
    def of(cls, masks: Sequence[Tensor | None], device: torch.device) -> "RowMasks | None":
        """Move the rows' masks to a device, in the order of the current stream. None if no row has
        one."""
        given = [mask for mask in masks if mask is not None]
        if not given:
            return None
        pinned = device.type == "cuda"
        words = given[0].shape[0]
        begin = -(-len(masks) // _ALIGNED) * _ALIGNED
        # One buffer, for one copy: the places, then the masks.
        host = torch.empty(begin + len(given) * words, dtype=torch.int32, pin_memory=pinned)
        numbers, at = host.numpy(), begin
        for row, mask in enumerate(masks):
            numbers[row] = -1 if mask is None else (at - begin) // words
            if mask is not None:
                numbers[at : at + words] = mask.numpy()
                at += words
        moved = host.to(device, non_blocking=True) if pinned else host
        return cls(moved[begin:].view(len(given), words), moved[: len(masks)])
