"""Which failures end a GPU slice's process, and which are a step's own."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from c2cserve.engine.gpu.setup import GpuParts
from c2cserve.kernels.gpu.driver import CudaError
from c2cserve.kernels.gpu.gemm.weight import OperandError


class Stream:
    def __init__(self, *, lost: bool) -> None:
        self._lost = lost

    def query(self) -> bool:
        if self._lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return False


def fatal(fault: Exception, *, lost: bool = False) -> bool:
    parts = SimpleNamespace(stream=Stream(lost=lost))
    return GpuParts.fatal(cast(Any, parts), fault)


@pytest.mark.parametrize("kind", [torch.AcceleratorError, torch.OutOfMemoryError, CudaError])
def test_cudas_own_errors_do(kind: type[Exception]) -> None:
    assert fatal(kind("of a kernel before"))


def test_others_do_where_the_gpu_is_lost() -> None:
    triton = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert fatal(triton, lost=True)
    assert not fatal(triton)
    assert not fatal(OperandError("W is [3, 5], not [N, K]"))
