"""CRC-32 of many bytes, by the native library where the CPU can."""

import functools
import zlib
from collections.abc import Callable

import numpy as np

from c2cserve.kernels.native import chosen_isa, cpu_flags, load_library

_FOLDED_BYTES = 64
"""`crc32.h` takes so many at a time."""


@functools.cache
def _folding() -> Callable[[int, int], int] | None:
    """Return the library's CRC-32 of an address and a multiple of 64 bytes, None if this CPU lacks
    the instruction."""
    if "pclmulqdq" not in cpu_flags():
        return None
    return getattr(load_library(chosen_isa()), "c2c_crc32", None)


def crc32(data: bytes | bytearray | memoryview) -> int:
    """Return what `zlib.crc32` returns, in a fifth of its time where the CPU can. The call releases
    the interpreter lock."""
    view = memoryview(data)
    whole = len(view) // _FOLDED_BYTES * _FOLDED_BYTES
    folded = _folding()
    if folded is None or not whole:
        return zlib.crc32(view)
    return zlib.crc32(view[whole:], folded(np.frombuffer(view, np.uint8).ctypes.data, whole))
