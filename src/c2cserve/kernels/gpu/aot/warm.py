"""Every Triton kernel, run once with a model's sizes, so that serving compiles nothing. The same
for libraries, which load their kernels on first use.

Triton keeps compiled kernels on disk, under a hash of their inputs, and a second start finds them
there. A kernel depends on no size that changes between steps (tokens, sequences, contexts, layers).
Models whose sizes are multiples of 16 share kernels if dtype, head size and the norms' width are
equal. (The width is rounded up to a power of two.)
"""

from dataclasses import dataclass

import torch

from c2cserve.core.tensors import HalfDtype
from c2cserve.kernels.gpu import elementwise
from c2cserve.kernels.gpu.attention.paged import Arrivals, attend
from c2cserve.kernels.gpu.gemm.experts import by_expert, choose
from c2cserve.kernels.gpu.gemm.weight import TORCH_DTYPES
from c2cserve.kernels.gpu.graph_inputs import GraphInputs
from c2cserve.kernels.gpu.sampling.greedy import greedy
from c2cserve.kernels.gpu.sampling.masks import RowMasks
from c2cserve.kernels.gpu.sampling.sample import asked_of, sample
from c2cserve.kernels.gpu.small_copies import copy_small, copy_small_out
from c2cserve.kernels.layer import KvLayout, Layer, LayerShape, LayerWeights, Mlp, TokenRows
from c2cserve.kernels.ops import RowSampling


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model that kernels are specialised on."""

    hidden: int
    inner: int
    """Width of the MLP, or of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: HalfDtype
    qk_norm: bool = False
    top_k: int = 0
    """Experts of a token; 0 for a dense model."""


COMMON = [
    Sizes(hidden, 4 * hidden, 32, 8, head_dim, 128256, "bfloat16", qk_norm=norm, top_k=2)
    for hidden in (1024, 2048, 4096, 8192)
    for head_dim, norm in ((64, False), (128, False), (128, True))
]
"""The sizes of most models. Kernels of other sizes are compiled when a model is attached."""


def warm(sizes: Sizes, device: torch.device) -> None:
    """Compile or load all kernels that a model of these sizes needs, and run each once."""
    dtype = TORCH_DTYPES[sizes.dtype]

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    x, weight = zeros(3, sizes.hidden), zeros(sizes.hidden, dtype=torch.float32)
    elementwise.rms_norm(x, weight, 1e-5)
    elementwise.add_rms_norm(x, x.clone(), weight, 1e-5)
    elementwise.silu_mul(zeros(3, 2 * sizes.inner))
    elementwise.embed(x, integers(0, 2), device)
    if sizes.top_k:
        places = zeros(1, sizes.top_k, dtype=torch.int64)
        elementwise.combine(x, places, zeros(1, sizes.top_k, dtype=torch.float32), 1)
    masks = zeros(1, -(-sizes.vocab // 32), dtype=torch.int32)
    for only in (None, RowMasks(masks, integers(0, -1))):
        greedy(zeros(2, sizes.vocab), only)
        sample(zeros(2, sizes.vocab), asked_of([RowSampling(0, 0)] * 2).to(device), only)
    elementwise.chained(integers(3, -1), integers(3))
    copy_small(integers(3, 4), integers(0, 0))
    copy_small_out(integers(3, 4), integers(0, 0))
    one = TokenRows(
        integers(0), integers(0, 1), integers(1), zeros(1, 1, dtype=torch.int64),
        zeros(1, dtype=torch.int64),
    )  # fmt: skip
    GraphInputs.make(2, sizes.hidden, 32, dtype, device).copy_in(x[:1], one)
    _warm_attention(sizes, device)


def _warm_attention(sizes: Sizes, device: torch.device) -> None:
    """Run all kernels of attention: on one sequence of two new tokens and one of one."""
    dtype, dim = TORCH_DTYPES[sizes.dtype], sizes.head_dim
    kv = KvLayout(1, sizes.kv_heads, dim, sizes.dtype)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def integers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    nothing = zeros(0)
    norms = (zeros(dim), zeros(dim)) if sizes.qk_norm else None
    mlp = Mlp(nothing, None, nothing, None)
    weights = LayerWeights(nothing, nothing, None, norms, nothing, None, nothing, mlp, window=0)
    layer = Layer(0, weights, LayerShape(kv, sizes.hidden, sizes.heads, 1e-5, 1.0))
    rows = TokenRows(
        positions=integers(0, 1, 0), q_start=integers(0, 2, 3), context_len=integers(2, 1),
        block_table=integers(0, 0, dtype=torch.int64)[:, None],
        slots=integers(0, 1, 2, dtype=torch.int64),
    )  # fmt: skip
    qkv = zeros(3, (sizes.heads + 2 * sizes.kv_heads) * dim, dtype=dtype)
    rope = zeros(4, dim // 2), zeros(4, dim // 2)
    attend(qkv, layer, rows, rope, zeros(kv.block_bytes, dtype=torch.uint8), Arrivals(device))


def touch_libraries(sizes: Sizes, device: torch.device) -> None:
    """Use cuBLAS and torch's own kernels once: they load on first use."""
    x = torch.zeros((2, 16), dtype=torch.bfloat16, device=device)
    x = torch.addmm(x[0], x, torch.zeros((16, 16), dtype=x.dtype, device=device))
    x += torch.mm(x, torch.zeros((16, 16), dtype=x.dtype, device=device))
    if sizes.top_k:
        routing = by_expert(*choose(x, min(2, sizes.top_k), renormalize=True), 16)
        x.index_select(0, routing.tokens)
    x[torch.tensor([1], device=device)].float().cpu()
