"""A GEMM with a known answer and traps around everything a kernel could touch by mistake."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from c2cserve.kernels.gpu import driver
from c2cserve.kernels.gpu.gemm.weight import WeightHandle, weight_of

HOMES = ("hbm", "host") + (("peer",) if torch.cuda.device_count() > 1 else ())
_MARGIN = 8
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass
class Case:
    """`x`'s rows are strided; `out` is a window of `frame`, which is NaN all over."""

    x: Tensor
    w: WeightHandle
    bias: Tensor | None
    frame: Tensor
    reference: Tensor

    @property
    def out(self) -> Tensor:
        return self.frame[_MARGIN:-_MARGIN, _MARGIN : _MARGIN + self.reference.shape[1]]

    def check(self, *, roundings: float = 1.0) -> None:
        """Right within rounding, everywhere, and nothing written outside. Sums of float32 add a
        little to the last rounding; `roundings` is how often values were rounded to 16 bits."""
        torch.cuda.synchronize()
        out, unit = self.out.double(), ROUNDING[self.out.dtype]
        assert not out.isnan().any(), f"{int(out.isnan().sum())} elements never written"
        scale = self.reference.abs() + self.reference.square().mean().sqrt()
        worst = float(((out - self.reference).abs() / scale).max())
        assert worst <= 1.1 * unit * roundings, f"off by {worst / unit:.2f} roundings"
        self.out.fill_(torch.nan)
        assert self.frame.isnan().all(), "wrote outside of the output"


def make_case(
    m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, home: str = "hbm", *,
    bias: bool = False, aligned: bool = True,
) -> Case:  # fmt: skip
    """Random operands. Not `aligned`: rows of the output at odd addresses."""
    stride = k + 24
    x = (torch.randn(m, stride, device="cuda") / 4).to(dtype)[:, :k]
    weight = (torch.randn(n, k, device="cuda") / 8).to(dtype)
    offset = torch.randn(n, device="cuda").to(dtype) if bias else None
    width = -(-n // 8) * 8 + 2 * _MARGIN + (0 if aligned else 1)
    frame = torch.full((m + 2 * _MARGIN, width), torch.nan, dtype=dtype, device="cuda")
    reference = x.double() @ weight.double().t()
    if offset is not None:
        reference += offset.double()
    return Case(x, at_home(weight, home), offset, frame, reference)


def at_home(weight: Tensor, home: str) -> WeightHandle:
    """Move a weight to where it is to be read from."""
    kind: Literal["host", "peer", "hbm"]
    match home:
        case "host":
            moved, kind = weight.cpu().pin_memory(), "host"
        case "peer":
            driver.enable_peer(0, 1)
            moved, kind = weight.to("cuda:1"), "peer"
        case _:
            moved, kind = weight, "hbm"
    torch.cuda.synchronize()
    return weight_of(moved, kind)
