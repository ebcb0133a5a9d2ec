"""A decoder layer as a GPU slice runs it: handles of its matrices, biases in their dtype.

Rows of long steps are padded, so that cuBLAS meets few numbers of them (`gemm.long_rows`). Lengths
of prompts hardly repeat, so most prompts would pay for a new one (`benchmarks/step_launch.py`, new
lengths). Attention leaves padding rows out, and no experts are chosen for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2cserve.core.tensors import HalfDtype, Home
from c2cserve.engine.models.config import ModelConfig
from c2cserve.kernels.gpu.gemm.long_rows import MatrixShape, padded_rows
from c2cserve.kernels.gpu.gemm.weight import DTYPES, OperandError, WeightHandle
from c2cserve.kernels.layer import Layer, LayerShape, LayerWeights, Mlp, TokenRows


@dataclass(frozen=True, slots=True)
class Matrix:
    weight: WeightHandle
    bias: Tensor | None = None
    """It is on the GPU and has the weight's dtype."""


@dataclass(frozen=True, slots=True)
class DenseHalf:
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class SparseHalf:
    router: Matrix
    w13: WeightHandle
    w2: WeightHandle
    per_token: int
    renormalize: bool


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class GpuLayer(Layer):
    qkv: Matrix
    o: Matrix
    second: DenseHalf | SparseHalf


def gpu_layer(
    index: int, weights: LayerWeights, shape: LayerShape, device: torch.device
) -> GpuLayer:
    """Make a layer. Raises `OperandError` for weights no kernel takes."""

    def matrix(weight: Tensor, bias: Tensor | None) -> Matrix:
        return Matrix(handle_of(weight, device), None if bias is None else bias.to(weight.dtype))

    mlp = weights.mlp
    if isinstance(mlp, Mlp):
        second: DenseHalf | SparseHalf = DenseHalf(
            matrix(mlp.gate_up, mlp.gate_up_bias), matrix(mlp.down, mlp.down_bias)
        )
    else:
        second = SparseHalf(
            matrix(mlp.router, None), handle_of(mlp.w13, device), handle_of(mlp.w2, device),
            mlp.per_token, mlp.renormalize,
        )  # fmt: skip
    qkv, o = matrix(weights.qkv, weights.qkv_bias), matrix(weights.o, weights.o_bias)
    return GpuLayer(index, weights, shape, qkv, o, second)


def handle_of(tensor: Tensor, device: torch.device) -> WeightHandle:
    """Return the handle of a matrix where it is: in `device`'s memory, in a peer's, or on the host.

    Host memory is that of a segment registered with CUDA (`memory.pinning`). Raises `OperandError`.
    """
    if tensor.dtype not in DTYPES or not tensor.is_contiguous():
        raise OperandError(
            f"GPU slices multiply contiguous bfloat16 or float16, not {tensor.dtype} of strides"
            f" {tensor.stride()}"
        )
    home: Home = "host"
    if tensor.device.type == "cuda":
        home = "hbm" if tensor.device == device else "peer"
    shape = tuple(tensor.shape)
    return WeightHandle(tensor.data_ptr(), shape, DTYPES[tensor.dtype], home, tensor)


def shapes_of(config: ModelConfig, dtype: HalfDtype) -> list[MatrixShape]:
    """Return the shapes of the matrices that long steps are multiplied by, each once. Those of
    experts and the head are left out: cuBLAS multiplies by neither."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner, moe = config.hidden, config.intermediate, config.moe
    shapes = [
        MatrixShape(q + 2 * kv, hidden, dtype, config.qkv_bias),
        MatrixShape(hidden, q, dtype, config.o_bias),
    ]
    if not all(config.sparse(layer) for layer in range(config.layers)):
        shapes.append(MatrixShape(2 * inner, hidden, dtype, config.mlp_bias))
        shapes.append(MatrixShape(hidden, inner, dtype, config.mlp_bias))
    if moe is not None:
        shapes.append(MatrixShape(moe.experts, hidden, dtype))
    return list(dict.fromkeys(shapes))


# ---- rows of long steps -------------------------------------------------------------------------

Launch = Callable[[Tensor, Sequence[GpuLayer], TokenRows, tuple[Tensor, Tensor], Tensor], Tensor]
"""Launches layers over hidden, rows, rotary tables and arena. Returns the last one's branch."""


def run_padded(
    launch: Launch, hidden: Tensor, layers: Sequence[GpuLayer], rows: TokenRows,
    rope: tuple[Tensor, Tensor], arena: Tensor,
) -> None:  # fmt: skip
    """Run layers in place: `hidden` [T, H] becomes the last layer's output. Raises as `launch`."""
    count = len(hidden)
    padded = padded_rows(count)
    if padded == count:
        hidden += launch(hidden, layers, rows, rope, arena)
        return
    wide = hidden.new_empty((padded, hidden.shape[1]))
    wide[:count] = hidden
    wide[count:].zero_()
    branch = launch(wide, layers, rows, rope, arena)
    hidden.copy_(wide[:count]).add_(branch[:count])
