"""Host memory that the GPU reads: segments registered with CUDA, once in each process.

The pages are the pool's own shared memory: a segment is in memory once, however many processes
register it. Registering takes the driver's locks and stalls kernels that start meanwhile. So it
is done when a model enters the pool, never at a switch. Pieces are at most 32 GiB, since one
registration of 512 GiB or more fails.
"""

import mmap
from importlib import import_module
from typing import Any

import numpy as np

_PIECE_BYTES = 32 << 30
_PAGE = mmap.PAGESIZE


class PinningError(RuntimeError):
    """Memory could not be registered with CUDA. The message has the driver's error."""


class PinnedRegion:
    """`size` bytes from `address` on, readable by every GPU of this process until `close`.

    Read-only mappings are registered read-only where the machine can: a worker's kernels cannot
    write to the pool. Raises `PinningError`, after undoing what was registered before the failure.
    """

    def __init__(self, address: int, size: int) -> None:
        if size < 1:
            raise ValueError(f"a region has at least 1 byte, not {size}")
        # The runtime and not the driver: it makes the process's context where there is none yet.
        self._cuda: Any = import_module("cuda.bindings.runtime")
        start = address // _PAGE * _PAGE
        stop = -(-(address + size) // _PAGE) * _PAGE
        self._pieces: list[int] = []
        self.address, self.size = address, size
        for piece in range(start, stop, _PIECE_BYTES):
            try:
                self._register(piece, min(_PIECE_BYTES, stop - piece))
            except PinningError:
                self.close()
                raise
        self.device_address = self._device_address(address)

    def _register(self, address: int, size: int) -> None:
        flags = self._cuda.cudaHostRegisterPortable | self._cuda.cudaHostRegisterMapped
        # A read-only mapping registers only as such; the flag is refused where it has no meaning.
        for extra in (0, self._cuda.cudaHostRegisterReadOnly):
            (code,) = self._cuda.cudaHostRegister(address, size, flags | extra)
            if int(code) == 0:
                self._pieces.append(address)
                return
            self._cuda.cudaGetLastError()  # else the next CUDA call would report the error
        raise PinningError(f"cudaHostRegister of {size} bytes: {code.name}")

    def _device_address(self, address: int) -> int:
        code, pointer = self._cuda.cudaHostGetDevicePointer(address, 0)
        if int(code) != 0:
            self.close()
            raise PinningError(f"cudaHostGetDevicePointer: {code.name}")
        return int(pointer)

    def close(self) -> None:
        """Unregister the memory. No kernel or copy may read it any more."""
        while self._pieces:
            self._cuda.cudaHostUnregister(self._pieces.pop())


def pin_array(data: "np.ndarray[Any, np.dtype[np.uint8]]") -> PinnedRegion:
    """Register a segment's bytes (`Segment.raw`, or all of its mapping). Raises `PinningError`."""
    return PinnedRegion(data.ctypes.data, data.nbytes)
