"""Made-up stacks of a GPU's decoder layers, on the CPU."""

import torch
from torch import Tensor

from c2cserve.engine.gpu.layers import GpuLayer, gpu_layer
from c2cserve.kernels.layer import Experts, KvLayout, LayerShape, LayerWeights, Mlp

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, DIM, INNER = 64, 4, 2, 16, 96


def layer_stack(
    seed: int, *, layers: int = 2, biased: bool = False, experts: int = 0, inner: int = INNER
) -> list[GpuLayer]:
    rng = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).bfloat16()

    def vector(size: int) -> Tensor:
        return torch.randn(size, generator=rng)

    def bias(size: int) -> Tensor | None:
        return vector(size) if biased else None

    shape = LayerShape(KvLayout(layers, KV_HEADS, DIM, "bfloat16"), HIDDEN, HEADS, 1e-5, 0.25)
    width = (HEADS + 2 * KV_HEADS) * DIM
    made: list[GpuLayer] = []
    for index in range(layers):
        mlp: Mlp | Experts = Mlp(
            matrix(2 * inner, HIDDEN), bias(2 * inner), matrix(HIDDEN, inner), bias(HIDDEN)
        )
        if experts and index:
            stacks = matrix(experts, 2 * inner, HIDDEN), matrix(experts, HIDDEN, inner)
            mlp = Experts(matrix(experts, HIDDEN), *stacks, 2, True)
        weights = LayerWeights(
            vector(HIDDEN), matrix(width, HIDDEN), bias(width),
            (vector(DIM), vector(DIM)) if experts else None,
            matrix(HIDDEN, HEADS * DIM), bias(HIDDEN), vector(HIDDEN), mlp, 0,
        )  # fmt: skip
        made.append(gpu_layer(index, weights, shape, CPU))
    return made


def rope(seed: int, length: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(length, DIM // 2, generator=rng), torch.rand(length, DIM // 2, generator=rng)
