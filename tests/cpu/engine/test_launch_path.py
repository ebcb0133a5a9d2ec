"""What the host does for a layer of a long prompt whose weights are in HBM: kernels are launched
one by one, so each call counts. Launches and GEMMs are stubbed here; the calls around them are not.
"""

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from c2cserve.engine.gpu.layers import DenseHalf, GpuLayer, Matrix
from c2cserve.engine.gpu.ops import GpuOps
from c2cserve.kernels.gpu import launcher
from c2cserve.kernels.gpu.gemm import linear
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.gemm.weight import WeightHandle, for_libraries
from c2cserve.kernels.layer import KvLayout, LayerShape, LayerWeights, Mlp, TokenRows

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 64, 4, 2, 16, 128
TOKENS = ROWS_STREAMED + 16
CALLS_MOST = 100
"""Of functions of Python and C, by a layer: 81 when this was written, and some more
for other versions of torch."""
LAUNCHES, GEMMS = 5, 4


def matrix(rows: int, columns: int) -> Matrix:
    memory = torch.zeros(rows, columns, dtype=torch.bfloat16)
    w = WeightHandle(memory.data_ptr(), (rows, columns), "bfloat16", "hbm", memory)
    return Matrix(for_libraries(w))


def layer(index: int, layers: int) -> GpuLayer:
    norm, nothing = torch.ones(HIDDEN), torch.empty(0)
    mlp = Mlp(nothing, None, nothing, None)
    weights = LayerWeights(norm, nothing, None, None, nothing, None, norm, mlp, 0)
    kv = KvLayout(layers, KV_HEADS, DIM, "bfloat16")
    return GpuLayer(
        index, weights, LayerShape(kv, HIDDEN, HEADS, 1e-5, DIM**-0.5),
        matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), matrix(HIDDEN, HEADS * DIM),
        DenseHalf(matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER)),
    )  # fmt: skip


class Counted:
    """Compiled kernels that are not there, and GEMMs that return memory."""

    def __init__(self) -> None:
        self.launches = self.gemms = 0
        self._outputs: dict[int, Tensor] = {}

    def launch(self, *_arguments: object) -> None:
        self.launches += 1

    def multiplied(self, x: Tensor, transposed: Tensor, _bias: Tensor | None) -> Tensor:
        self.gemms += 1
        width = transposed.shape[1]
        if width not in self._outputs:
            self._outputs[width] = x.new_empty(x.shape[0], width)
        return self._outputs[width]


def step(ops: GpuOps, layers: int) -> Callable[[], object]:
    rows = TokenRows(
        positions=torch.arange(TOKENS, dtype=torch.int32),
        q_start=torch.tensor([0, TOKENS], dtype=torch.int32),
        context_len=torch.tensor([TOKENS], dtype=torch.int32),
        block_table=torch.zeros(1, 64, dtype=torch.int64),
        slots=torch.zeros(TOKENS, dtype=torch.int64),
    )
    hidden = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    rope = torch.zeros(4096, DIM // 2), torch.zeros(4096, DIM // 2)
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    every = [layer(index, layers) for index in range(layers)]
    return lambda: ops._launch_layers(hidden, every, rows, rope, arena)


def calls(run: Callable[[], object]) -> int:
    """Count calls of functions, Python's and C's."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def test_calls_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr(launcher, "current_stream", lambda _device: 0)
    compiled = launcher._Compiled(counted.launch, (), ())

    def by_triton(self: Any, _grid: Any, tensors: Any, _numbers: Any, key: Any) -> None:
        monkeypatch.setitem(self._compiled, (tensors[0].get_device(), key), compiled)

    monkeypatch.setattr(launcher.Launcher, "_launch_by_triton", by_triton)
    monkeypatch.setattr(linear, "multiplied", counted.multiplied)
    context, chooser = SimpleNamespace(picked_for=132, device=0), SimpleNamespace()
    # The chooser has nothing to be asked: a look-up would raise.
    multiply: Any = Linear(context, chooser)  # pyright: ignore[reportArgumentType]
    no_sampler: Any = None
    ops = GpuOps(multiply, torch.device("cpu"), no_sampler)
    step(ops, 2)()  # kernels "compile", those of a first layer and of another
    counted.launches = counted.gemms = 0
    few, many = calls(step(ops, 1)), calls(step(ops, 9))
    assert (counted.launches, counted.gemms) == (10 * LAUNCHES, 10 * GEMMS)
    a_layer = (many - few) / 8
    assert a_layer <= CALLS_MOST, f"a layer takes {a_layer:.0f} calls"
