"""The relay kernel, and the parameters of its launches."""

import ctypes
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from c2cserve.kernels.gpu.aot.compiler import cubin_path, default_folder
from c2cserve.kernels.gpu.aot.repository import KernelMissingError
from c2cserve.kernels.gpu.aot.variants import RELAY
from c2cserve.kernels.gpu.driver import checked, cu
from c2cserve.transfer.moves import Piece

PIECES_MAX = RELAY.pieces


class RelayPiece(ctypes.Structure):
    _fields_ = (
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


class RelayParams(ctypes.Structure):
    """`RelayParams` of relay.cu."""

    _fields_ = (
        ("recalled", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("number", ctypes.c_uint32),
        ("pieces", ctypes.c_uint32),
        ("piece", RelayPiece * PIECES_MAX),
    )


class Relay:
    """The kernel, for every GPU of the process. Raises `KernelMissingError` if it is not built."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or default_folder()
        path = cubin_path(folder, RELAY)
        if not path.exists():
            raise KernelMissingError(RELAY, folder)
        core: Any = import_module("cuda.core")
        code = core.ObjectCode.from_cubin(path.read_bytes(), name=RELAY.name)
        self._loaded = code.get_kernel(RELAY.source)  # the code is unloaded with it
        # The stream says which context a kernel without one of its own is launched in.
        self._function: Any = cu.CUfunction(int(self._loaded.handle))

    def launch(self, arguments: "RelayArguments", ctas: int, stream: Any) -> None:
        """Raises `CudaError`."""
        result = cu.cuLaunchKernel(
            self._function, ctas, 1, 1, RELAY.threads, 1, 1, 0, stream, arguments.pointers, 0
        )
        checked("cuLaunchKernel(relay)", result)


class RelayArguments:
    """The parameters of one slot's launches. A launch copies them, so they can be used again."""

    def __init__(self, recalled: int, started: int) -> None:
        """The two are addresses of flags in host memory."""
        self._params = RelayParams(recalled=recalled, started=started)
        self._array = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self.pointers = ctypes.addressof(self._array)

    @property
    def number(self) -> int:
        """The number of the last launch, modulo 2**32."""
        return self._params.number

    def set(self, pieces: Sequence[Piece]) -> None:
        """Prepare the next launch."""
        params = self._params
        params.number += 1
        params.pieces = len(pieces)
        for at, piece in enumerate(pieces):
            params.piece[at] = (piece.target, piece.source, piece.size)
