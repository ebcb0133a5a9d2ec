"""Small copies from pinned memory of the host to a GPU, by a kernel.

A copy engine does its copies in order. While whole models are loaded it always has some of 16 MiB
queued. The inputs of a step would wait for them, for a millisecond: half of what the step takes. A
kernel's reads share the link with those copies instead.
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
def _copy_kernel(out, pinned, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_others(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(pinned + at, inside, 0), inside)


def copy_small(pinned: Tensor, out: Tensor) -> None:
    """Copy `pinned` int32 [N] to `out` int32 [N] on the GPU, in the order of its current stream.

    Both are contiguous. The caller keeps `pinned` as it is until that is over: unlike with torch's
    copies, torch does not know that it is being read.
    """
    count = out.numel()
    if pinned.nbytes > BYTES_MOST:
        out.copy_(pinned, non_blocking=True)
    elif count:
        _launch_copy((-(-count // _WORDS), 1, 1), (out, pinned), (count,), ())


def _constants() -> dict[str, Any]:
    return {"BLOCK": _WORDS, "num_warps": 4}


_launch_copy = Launcher(_copy_kernel, _constants)
