"""32-bit flags in host memory that GPUs read and write: launches recalled, streams held."""

import ctypes
from collections import deque

from c2cserve.kernels.gpu.driver import CudaError, checked, cu

_STRIDE = 32
"""Flags lie 128 bytes apart: GPUs that write one transfer no other with it."""
_SIGN = 1 << 31


class Flags:
    """`count` flags, all 0, that every GPU of the process reaches. Raises `CudaError`.

    A CUDA context is current when this is made.
    """

    def __init__(self, count: int) -> None:
        size = 4 * _STRIDE * count
        how = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        self._memory = int(checked("cuMemHostAlloc", cu.cuMemHostAlloc(size, how)))
        mapped = checked("cuMemHostGetDevicePointer", cu.cuMemHostGetDevicePointer(self._memory, 0))
        self._mapped = int(mapped)
        self._words = (ctypes.c_uint32 * (_STRIDE * count)).from_address(self._memory)
        for number in range(count):
            self[number] = 0

    def __getitem__(self, number: int) -> int:
        return self._words[_STRIDE * number]

    def __setitem__(self, number: int, value: int) -> None:
        self._words[_STRIDE * number] = value

    def address(self, number: int) -> int:
        """Return where GPUs find a flag."""
        return self._mapped + 4 * _STRIDE * number

    def close(self) -> None:
        """Free the memory. No GPU may use it any more."""
        checked("cuMemFreeHost", cu.cuMemFreeHost(self._memory))


class Holds:
    """Streams that are held until they are let go of, in any order. Not thread-safe.

    A held stream waits until a flag has reached a number. Flags are used again, for higher ones.
    """

    def __init__(self, flags: Flags, count: int) -> None:
        self._flags = flags
        self._free = deque(range(count))
        self._values = [0] * count

    def take(self) -> tuple[int, int, int]:
        """Return a hold's number, the address to wait at, and the value to wait for.

        Raises `CudaError` if all are taken.
        """
        if not self._free:
            raise CudaError(f"{len(self._values)} streams are held already")
        number = self._free.popleft()
        # Streams compare modulo 2**32, and the difference is below 2**31.
        value = self._values[number] = (self._values[number] + 1) % (2 * _SIGN)
        return number, self._flags.address(number), value

    def let_go(self, number: int) -> None:
        self._flags[number] = self._values[number]
        self._free.append(number)
