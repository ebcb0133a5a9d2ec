"""Mixtures of experts: only experts that were chosen are read, and rows never mix."""

import pytest
import torch
from gemm_case import HOMES, ROUNDING, at_home

from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS
from c2cserve.kernels.gpu.gemm.launchers.direct import grouped
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.launch_context import LaunchContext

pytestmark = pytest.mark.gpu

GROUPED = sorted({(v.bx, v.cluster) for v in VARIANTS if v.source == "grouped"})


def counts_of(experts: int, rows: int, kind: str) -> list[int]:
    match kind:
        case "all on one":
            return [rows if e == experts // 2 else 0 for e in range(experts)]
        case "few":
            return [rows // 3 if e % 7 == 3 else 0 for e in range(experts)]
        case _:
            picks = torch.randint(experts, (rows,))
            return torch.bincount(picks, minlength=experts).tolist()


@pytest.mark.parametrize(("bx", "cluster"), GROUPED)
@pytest.mark.parametrize("kind", ["all on one", "few", "spread"])
def test_grouped(context: LaunchContext, bx: int, cluster: int, kind: str) -> None:
    for i, (experts, rows, n, k, dtype) in enumerate(
        [
            (8, 64, 256, 128, torch.bfloat16),
            (33, 700, 200, 264, torch.float16),
            (128, 2048, 768, 512, torch.bfloat16),
        ]
    ):
        counts = counts_of(experts, rows, kind)
        total = sum(counts)
        x = (torch.randn(total, k, device="cuda") / 4).to(dtype)
        weight = (torch.randn(experts, n, k, device="cuda") / 8).to(dtype)
        offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
        out = torch.full((total, n), torch.nan, dtype=dtype, device="cuda")
        handle = at_home(weight, HOMES[i % len(HOMES)])
        grouped(context, x, handle, offsets, out, Tiles(bx=bx, cluster=cluster))
        torch.cuda.synchronize()
        first = 0
        for expert, count in enumerate(counts):
            reference = x[first : first + count].double() @ weight[expert].double().t()
            mine = out[first : first + count].double()
            assert not mine.isnan().any()
            if count:
                scale = reference.abs() + reference.square().mean().sqrt()
                worst = float(((mine - reference).abs() / scale).max())
                assert worst <= 1.1 * ROUNDING[dtype], f"expert {expert}"
            first += count


def test_an_expert_nobody_chose_is_never_read(context: LaunchContext) -> None:
    """Its weights are NaN, and NaN would spread."""
    experts, n, k = 16, 384, 256
    weight = torch.randn(experts, n, k, device="cuda").to(torch.bfloat16)
    counts = [5 if e % 2 else 0 for e in range(experts)]
    weight[::2] = torch.nan
    x = torch.randn(sum(counts), k, device="cuda").to(torch.bfloat16)
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    out = torch.full((sum(counts), n), torch.nan, dtype=torch.bfloat16, device="cuda")
    grouped(context, x, at_home(weight, "host"), offsets, out, Tiles(bx=16))
    torch.cuda.synchronize()
    assert not out.isnan().any()
