"""Masks of the tokens that rows may sample, on the GPU: grammars, for instance, allow few.

masks    [M, ceil(V / 32)]   a bit for each token, of the rows that have one
places   [R]                 where a row's mask is; -1 for rows without, which read no mask
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.small_copies import BYTES_MOST, copy_small
from c2cserve.kernels.ops import AwaitedMasks

_ALIGNED = 4
"""Kernels are compiled for pointers at multiples of so many int32."""
_POLL_S = 0.0002


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
    read: Tensor | None = None
    """Memory of the host that they come from. It must not be freed until they are used."""

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
        moved = torch.empty_like(host, device=device) if pinned else host
        if pinned:
            copy_small(host, moved)
        return cls(moved[begin:].view(len(given), words), moved[: len(masks)], host)

    @classmethod
    def when_ready(cls, awaited: AwaitedMasks, rows: int, device: torch.device) -> "RowMasks":
        """Move masks to a device when they are ready, in the order of the current stream: the
        stream waits for them, the caller does not. `rows`: of the sample."""
        begin, words = awaited.places_at, awaited.words
        if device.type == "cuda":
            # The driver is not there where kernels are interpreted.
            from c2cserve.kernels.gpu.driver import copy_async, wait_at_least

            stream = torch.cuda.current_stream(device).cuda_stream
            moved = torch.empty(len(words) - begin, dtype=torch.int32, device=device)
            wait_at_least(stream, awaited.address, 1)
            if moved.nbytes <= BYTES_MOST:
                copy_small(words[begin:], moved)  # memory of the masks' process, which keeps it
            else:
                copy_async(moved.data_ptr(), awaited.address + 4 * begin, moved.nbytes, stream)
        else:
            while not int(words[0]):  # such a device has no streams
                time.sleep(_POLL_S)
            moved = words[begin:]
        masks = moved[awaited.masks_at - begin :]
        return cls(masks[: awaited.count * awaited.width].view(awaited.count, -1), moved[:rows])
