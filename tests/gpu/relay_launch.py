"""Launches of the relay kernel alone, without the engine."""

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


class RelayLaunch:
    """Launches on one GPU, each awaited."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        core: Any = import_module("cuda.core")
        code = cubin_path(default_folder(), RELAY).read_bytes()
        self._kernel = core.ObjectCode.from_cubin(code, name=RELAY.name).get_kernel(RELAY.source)
        self._flags = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self.number = 0

    @property
    def started(self) -> int:
        """The number of the last launch that has begun."""
        return int(self._flags.view(torch.uint32)[32])

    def copy(self, pieces: Sequence[tuple[int, int, int]], *, recalled: bool = False) -> None:
        """Copy pieces of (target, source, size)."""
        self.number += 1
        if recalled:
            self._flags.view(torch.uint32)[0] = self.number
        flags = self._flags.data_ptr()
        params = struct.pack("=QQII", flags, flags + 128, self.number, len(pieces))
        params += b"".join(struct.pack("=QQQ", *piece) for piece in pieces)
        memory = ctypes.create_string_buffer(params, 24 + 24 * RELAY.pieces)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        with use(self._gpu):
            function = cu.CUfunction(int(self._kernel.handle))
            launched = cu.cuLaunchKernel(
                function, 4, 1, 1, RELAY.threads, 1, 1, 0, cu.CUstream(0),
                ctypes.addressof(pointers), 0,
            )  # fmt: skip
            checked("cuLaunchKernel(relay)", launched)
        torch.cuda.synchronize(self._gpu)
