"""Launches of the relay kernel alone, without the engine, for the benchmark and the tests."""

import ctypes
import struct
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from c2cserve.kernels.gpu.aot.compiler import cubin_path, default_folder
from c2cserve.kernels.gpu.aot.variants import RELAY
from c2cserve.kernels.gpu.driver import checked, cu
from c2cserve.transfer.gpus import use
from c2cserve.transfer.settings import RelayShape

_HEADER = "=QQIIIII4x"
_PIECE = "=QQQ"
_STARTED = 32
"""The place of the second flag, in words: a cache line of its own."""


class RelayLaunch:
    """Launches on one GPU."""

    def __init__(self, gpu: int, shape: RelayShape | None = None) -> None:
        self._gpu = gpu
        self._shape = shape or RelayShape()
        self._shared_bytes = self._shape.stages * self._shape.stage_bytes
        core: Any = import_module("cuda.core")
        code = cubin_path(default_folder(), RELAY).read_bytes()
        self._module = core.ObjectCode.from_cubin(code, name=RELAY.name)
        kernel = int(self._module.get_kernel(RELAY.source).handle)
        self._function = cu.CUfunction(kernel)
        most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with use(gpu):
            device = checked("cuDeviceGet", cu.cuDeviceGet(gpu))
            allowed = cu.cuKernelSetAttribute(most, self._shared_bytes, cu.CUkernel(kernel), device)
            checked("cuKernelSetAttribute", allowed)
        self._flags = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self.number = 0

    @property
    def started(self) -> int:
        """The number of the last launch that has begun."""
        return int(self._flags.view(torch.uint32)[_STARTED])

    def copy(self, pieces: Sequence[tuple[int, int, int]], *, recalled: bool = False) -> None:
        """Copy pieces of (target, source, size), and wait for the end."""
        if recalled:
            self.recall(self.number + 1)
        self.launch(pieces)
        torch.cuda.synchronize(self._gpu)

    def recall(self, number: int | None = None) -> None:
        """Recall a launch, the last one unless another is given."""
        self._flags.view(torch.uint32)[0] = self.number if number is None else number

    def launch(self, pieces: Sequence[tuple[int, int, int]], stream: int = 0) -> None:
        """Let a stream of the GPU copy pieces of (target, source, size)."""
        self.number += 1
        flags = self._flags.data_ptr()
        params = struct.pack(
            _HEADER, flags, flags + 4 * _STARTED, self.number, len(pieces), self._shape.stages,
            self._shape.stage_bytes, self._shape.recall_poll_bytes,
        )  # fmt: skip
        params += b"".join(struct.pack(_PIECE, *piece) for piece in pieces)
        size = struct.calcsize(_HEADER) + struct.calcsize(_PIECE) * RELAY.pieces
        memory = ctypes.create_string_buffer(params, size)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        with use(self._gpu):
            launched = cu.cuLaunchKernel(
                self._function, self._shape.ctas, 1, 1, RELAY.threads, 1, 1, self._shared_bytes,
                cu.CUstream(stream), ctypes.addressof(pointers), 0,
            )  # fmt: skip
            checked("cuLaunchKernel(relay)", launched)
