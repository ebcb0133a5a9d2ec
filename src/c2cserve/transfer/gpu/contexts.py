"""The primary contexts of GPUs, which torch and the CUDA runtime use, too."""

import contextlib
from collections.abc import Generator
from functools import cache
from typing import Any

import torch

from c2cserve.kernels.gpu.driver import checked, cu


@cache
def context_of(gpu: int) -> Any:
    """Return the primary context of a GPU, by CUDA's number. It is never given back."""
    torch.cuda.init()
    checked("cuInit", cu.cuInit(0))
    device = checked("cuDeviceGet", cu.cuDeviceGet(gpu))
    return checked("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device))


@contextlib.contextmanager
def use(gpu: int) -> Generator[None]:
    """Make a GPU's context this thread's current one meanwhile. Raises `CudaError`."""
    checked("cuCtxPushCurrent", cu.cuCtxPushCurrent(context_of(gpu)))
    try:
        yield
    finally:
        checked("cuCtxPopCurrent", cu.cuCtxPopCurrent())
