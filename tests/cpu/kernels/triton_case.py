"""Where Triton's kernels are tested (a GPU, or interpreted without one), and how near is right."""

import torch
from interpreted import DEVICE
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
# The interpreter cuts bfloat16 off where a GPU rounds.
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, *, roundings: float = 1.0, mean: float = 0.01) -> None:
    """Within `roundings` units of got's dtype, each of its element's size plus `mean` of what is
    usual: what is summed up ends in another order, or was rounded before."""
    assert not got.isnan().any()
    unit, want = UNIT[got.dtype], want.double()
    scale = want.abs() + mean * want.square().mean().sqrt() + 1e-9
    worst = float(((got.cpu().double() - want).abs() / scale).max())
    assert worst <= 1.02 * unit * roundings, f"off by {worst / unit:.2f} roundings"
