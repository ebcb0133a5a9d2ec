"""Each kernel that is built, once, on shapes just past one tile: small enough for sanitizers.
Those that take a gate are in `test_gated`."""

import pytest
import torch
from gemm_case import ROUNDING, make_case

from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS
from c2cserve.kernels.gpu.gemm.launchers.direct import direct, grouped, split
from c2cserve.kernels.gpu.gemm.launchers.hybrid import hybrid
from c2cserve.kernels.gpu.gemm.launchers.staged import ring, tee
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import TORCH_DTYPES, weight_of
from c2cserve.kernels.gpu.launch_context import LaunchContext

pytestmark = pytest.mark.gpu

N, K = 136, 200
"""One tile of W and a bit; three k steps and a bit."""
ALONE = [one for one in VARIANTS if one.source != "grouped" and not one.gated]
GROUPED = [one for one in VARIANTS if one.source == "grouped"]


@pytest.mark.parametrize("variant", ALONE, ids=lambda one: one.name)
def test_variant(context: LaunchContext, variant: Variant) -> None:
    m = variant.bx * (1 if variant.source == "split" else variant.cluster) + 1
    case = make_case(m, N, K, TORCH_DTYPES[variant.dtype], "host", bias=True)
    tiles = Tiles(bx=variant.bx, cluster=variant.cluster, panel_rows=128, slots=2)
    roundings = 1
    match variant.source:
        case "split":
            split(context, case.x, case.w, case.bias, case.out, tiles)
        case "ring":
            ring(context, case.x, case.w, case.bias, case.out, tiles)
        case "hybrid":
            width = 2 if variant.partial_bytes == 2 else 4
            tiles = Tiles(bx=variant.bx, kp=variant.kp, partial_bytes=width, alpha=0.5)
            roundings = 1 if width == 4 else 4
            hybrid(context, case.x, case.w, case.bias, case.out, tiles)
        case _ if variant.tee:
            roundings = 2  # cuBLAS, on the rows past the first pass, rounds before it adds a bias
            tee(context, case.x, case.w, case.bias, case.out, tiles)
        case _:
            direct(context, case.x, case.w, case.bias, case.out, tiles)
    case.check(roundings=roundings)


@pytest.mark.parametrize("variant", GROUPED, ids=lambda one: one.name)
def test_grouped_variant(context: LaunchContext, variant: Variant) -> None:
    counts = [0, 3, variant.bx + 1, 0, 1]
    dtype = TORCH_DTYPES[variant.dtype]
    x = (torch.randn(sum(counts), K, device="cuda") / 4).to(dtype)
    weight = (torch.randn(len(counts), N, K) / 8).to(dtype).pin_memory()
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    out = torch.full((sum(counts), N), torch.nan, dtype=dtype, device="cuda")
    tiles = Tiles(bx=variant.bx, cluster=variant.cluster)
    grouped(context, x, weight_of(weight, "host"), offsets, out, tiles)
    expert = torch.repeat_interleave(torch.tensor(counts)).cuda()
    reference = torch.einsum("rk,rnk->rn", x.double(), weight.cuda().double()[expert])
    off = (out.double() - reference).abs() / (reference.abs() + reference.square().mean().sqrt())
    assert float(off.max()) <= 1.1 * ROUNDING[dtype]
