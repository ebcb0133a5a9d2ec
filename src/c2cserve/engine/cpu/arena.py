"""Memory for a CPU slice's KV blocks."""

import contextlib
import mmap

import torch
from torch import Tensor

_MAP_NORESERVE = 0x4000  # Linux; not in Python 3.11's mmap module


def make_arena(size: int) -> Tensor:
    """Anonymous memory that costs nothing until it is touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    with contextlib.suppress(OSError):  # a kernel without huge pages serves as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
