"""Host memory that the GPU reads: registered with CUDA, once in each process.

The pages are the pool's own shared memory: a segment is in memory once, however many processes
register it. Registering takes the driver's locks, and everything that the process has on its GPU
stands still meanwhile. So what is registered while steps run is registered in pieces
(`memory.gradual_pinning`). What a slice has from its start on is registered here, at once.

Registrations meet at multiples of `BORDER_BYTES` only (`kernels.gpu.host_borders`). Copies are cut
there. With unified addresses, registered memory has the same address on the GPU as on the host, on
both sides of a border. That is checked for every registration.
"""

import mmap
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from c2cserve.kernels.gpu.host_borders import BORDER_BYTES

_AT_ONCE_BYTES = 512 * BORDER_BYTES
"""32 GiB: one registration of 512 GiB or more fails."""
_PAGE = mmap.PAGESIZE


class PinningError(RuntimeError):
    """Memory could not be registered with CUDA. The message has the driver's error."""


class Registrar(Protocol):
    """What registers whole pages: CUDA, or a test's."""

    def register(self, address: int, size: int) -> None:
        """Raises `PinningError`, and nothing is registered then."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of this address. No kernel or copy reads the memory any more."""
        ...


class CudaRegistrar:
    """CUDA, for all GPUs of this process. Its calls release the interpreter's lock."""

    def __init__(self, device: int | None = None) -> None:
        """`device`: the GPU of threads that have not chosen any. None: they all have."""
        # The runtime and not the driver: it makes the process's context where there is none yet.
        self._cuda: Any = import_module("cuda.bindings.runtime")
        self._device = device

    def register(self, address: int, size: int) -> None:
        """Read-only mappings are registered read-only where the machine can: a worker's kernels
        cannot write to the pool."""
        if self._device is not None:
            self._cuda.cudaSetDevice(self._device)
        flags = self._cuda.cudaHostRegisterPortable | self._cuda.cudaHostRegisterMapped
        # A read-only mapping registers only as such; the flag is refused where it has no meaning.
        for extra in (0, self._cuda.cudaHostRegisterReadOnly):
            (code,) = self._cuda.cudaHostRegister(address, size, flags | extra)
            if int(code) == 0:
                self._check_address(address)
                return
            self._cuda.cudaGetLastError()  # else the next CUDA call would report the error
        raise PinningError(f"cudaHostRegister of {size} bytes: {code.name}")

    def _check_address(self, address: int) -> None:
        code, pointer = self._cuda.cudaHostGetDevicePointer(address, 0)
        if int(code) == 0 and int(pointer) == address:
            return
        self.unregister(address)
        if int(code) != 0:
            raise PinningError(f"cudaHostGetDevicePointer: {code.name}")
        raise PinningError("the GPU has registered memory at another address than the host")

    def unregister(self, address: int) -> None:
        self._cuda.cudaHostUnregister(address)


def page_pieces(
    address: int, size: int, most: int, border_bytes: int = BORDER_BYTES
) -> Iterator[tuple[int, int]]:
    """Yield (address, size) of the whole pages with these bytes, in pieces of up to `most` bytes
    that meet at borders. As few as can be: what has at most so many bytes is one, unless `most` is
    the distance of borders."""
    if size < 1:
        raise ValueError(f"a region has at least 1 byte, not {size}")
    start = address // _PAGE * _PAGE
    stop = -(-(address + size) // _PAGE) * _PAGE
    while start < stop:
        end = stop
        if most == border_bytes or stop - start > most:
            end = min(stop, (start + most) // border_bytes * border_bytes)
        yield start, end - start
        start = end


class PinnedRegion:
    """`size` bytes from `address` on, registered at once. Every GPU of this process reads them at
    that address until `close`.

    Raises `PinningError`, after undoing what was registered before the failure.
    """

    def __init__(self, address: int, size: int, registrar: Registrar | None = None) -> None:
        pieces = list(page_pieces(address, size, _AT_ONCE_BYTES))
        self._registrar = registrar or CudaRegistrar()
        self._pieces: list[int] = []
        self.address, self.size = address, size
        for piece, piece_bytes in pieces:
            try:
                self._registrar.register(piece, piece_bytes)
            except PinningError:
                self.close()
                raise
            self._pieces.append(piece)

    def close(self) -> None:
        """Unregister the memory. No kernel or copy may read it any more."""
        while self._pieces:
            self._registrar.unregister(self._pieces.pop())


def pin_array(data: NDArray[np.uint8]) -> PinnedRegion:
    """Register the bytes of an array at once. Raises `PinningError`."""
    return PinnedRegion(data.ctypes.data, data.nbytes)
