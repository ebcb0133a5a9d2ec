"""A decoder layer as a GPU slice runs it: handles of its matrices, biases in their dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu.gemm.weight import DTYPES, OperandError, WeightHandle
from c2cserve.kernels.layer import Layer, LayerShape, LayerWeights, Mlp


@dataclass(frozen=True, slots=True)
class Matrix:
    weight: WeightHandle
    bias: Tensor | None = None
    """On the GPU, of the weight's dtype."""


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
    """Raises `OperandError` for weights no kernel takes."""

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
    """A matrix where it is: in `device`'s memory, in a peer's, or in host memory, which is that of
    a segment registered with CUDA (`memory.pinning`). Raises `OperandError`."""
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
