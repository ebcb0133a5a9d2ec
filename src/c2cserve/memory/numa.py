"""The NUMA nodes on which the pages of a file in shared memory lie.

The kernel keeps a policy with such a file, for all that take its pages later. It is set by `mbind`
on a mapping of the file. The system call is made as it is: there need not be a libnuma.
"""

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence

import numpy as np

_NUMBERS = {"x86_64": 237, "aarch64": 235}
_PREFERRED, _INTERLEAVE = 1, 3
_WORD_BITS = 64

_libc = ctypes.CDLL(None, use_errno=True)


def place_file(fd: int, size: int, nodes: Sequence[int]) -> None:
    """Let the pages of a shared-memory file, of which none is taken yet, be taken on these nodes.

    With several nodes they take turns. Where a node is full, another one gives its pages. The file
    gets its size. Raises OSError where the kernel, or a container's rules, do not allow it.
    """
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        try:
            _mbind(view.ctypes.data, size, nodes)
        finally:
            del view  # it holds the mapping


def _mbind(address: int, size: int, nodes: Sequence[int]) -> None:
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    arguments = (address, size, mode, ctypes.addressof(mask), words * _WORD_BITS + 1, 0)
    if _libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
