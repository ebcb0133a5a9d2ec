"""Small copies between pinned memory of the host and a GPU, by a kernel.

A copy engine does its copies in order. While whole models are loaded it always has some of 16 MiB
queued, and so has the other direction's while KV goes out. The inputs of a step, or its tokens,
would wait for them, for a millisecond: half of what the step takes. A kernel's reads and writes
share the link with those copies instead.
"""

# Device code is Triton's language, with its own types and its constants in capitals.
# pyright: basic, reportCallIssue=false
# ruff: noqa: N803

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from c2cserve.kernels.gpu.launcher import Launcher
from c2cserve.kernels.gpu.programmatic_launch import after_others

_WORDS = 1024
"""The int32 that one program copies."""
BYTES_MOST = 1 << 18
"""Larger copies take the link longer than they would wait for a copy engine."""


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(gpu, pinned, count, OUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_others(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if OUT:
        tl.store(pinned + at, tl.load(gpu + at, inside, 0), inside)
    else:
        tl.store(gpu + at, tl.load(pinned + at, inside, 0), inside)


def copy_small(pinned: Tensor, out: Tensor) -> None:
    """Copy `pinned` int32 [N] to `out` int32 [N] on the GPU, in the order of its current stream.

    Both are contiguous. The caller keeps `pinned` as it is until that is over: unlike with torch's
    copies, torch does not know that it is being read.
    """
    if pinned.nbytes > BYTES_MOST:
        out.copy_(pinned, non_blocking=True)
    else:
        _launch(out, pinned, out=False)


def copy_small_out(given: Tensor, pinned: Tensor) -> None:
    """Copy `given` int32 [N] on a GPU to `pinned` int32 [N], in the order of its current stream.

    Both are contiguous. The caller keeps `pinned` until that is over: torch does not know that it
    is being written, and would lend freed memory to others.
    """
    if pinned.nbytes > BYTES_MOST:
        pinned.copy_(given, non_blocking=True)
    else:
        _launch(given, pinned, out=True)


def _launch(gpu: Tensor, pinned: Tensor, *, out: bool) -> None:
    if count := gpu.numel():
        _launch_copy((-(-count // _WORDS), 1, 1), (gpu, pinned), (count,), (out,))


def _constants(out: bool) -> dict[str, Any]:
    return {"OUT": out, "BLOCK": _WORDS, "num_warps": 4}


_launch_copy = Launcher(_copy_kernel, _constants)
