"""GEMMs that end in silu(gate) * up: bit for bit the GEMM and the activation after it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gemm_case import HOMES, Case, at_home
from torch import Tensor

from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.driver import MAP_BYTES
from c2cserve.kernels.gpu.elementwise import silu_mul
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS
from c2cserve.kernels.gpu.gemm.launchers.direct import direct, gated_map, split
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.gemm.measure import capture
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import TORCH_DTYPES, OperandError
from c2cserve.kernels.gpu.launch_context import LaunchContext

pytestmark = pytest.mark.gpu

GATED = [one for one in VARIANTS if one.gated]
Flow = Callable[..., None]


def gated_case(
    m: int, inner: int, k: int, dtype: torch.dtype = torch.bfloat16, home: str = "hbm", *,
    bias: bool = False, aligned: bool = True,
) -> Case:  # fmt: skip
    """Activations large enough for silu to bend; `reference` is in float64."""
    x = torch.randn(m, k + 24, device="cuda").to(dtype)[:, :k]
    weight = (torch.randn(2 * inner, k, device="cuda") * (4 / k**0.5)).to(dtype)
    offset = torch.randn(2 * inner, device="cuda").to(dtype) if bias else None
    width = -(-inner // 8) * 8 + 16 + (0 if aligned else 1)
    frame = torch.full((m + 16, width), torch.nan, dtype=dtype, device="cuda")
    both = x.double() @ weight.double().t()
    if offset is not None:
        both += offset.double()
    gate, up = both.chunk(2, -1)
    reference = torch.nn.functional.silu(gate) * up
    return Case(x, at_home(weight, home), offset, frame, reference)


def flow_of(variant: Variant) -> tuple[Flow, Tiles]:
    tiles = Tiles(bx=variant.bx, cluster=variant.cluster)
    return (direct if variant.source == "direct" else split), tiles


def apart(context: LaunchContext, flow: Flow, case: Case, tiles: Tiles) -> Tensor:
    """The GEMM, and the activation after it."""
    both = torch.empty(len(case.x), case.w.n, dtype=case.x.dtype, device="cuda")
    flow(context, case.x, case.w, case.bias, both, tiles)
    return silu_mul(both)


@pytest.mark.parametrize("variant", GATED, ids=lambda one: one.name)
def test_every_variant(context: LaunchContext, variant: Variant) -> None:
    """Inner sizes that are multiples of no tile, several blocks of X, strided rows, windows."""
    flow, tiles = flow_of(variant)
    shapes = [
        (1, 8, 8), (1, 14336, 4096), (7, 65, 72), (variant.bx, 200, 328), (variant.bx + 1, 500, 200)
    ]  # fmt: skip
    for i, (m, inner, k) in enumerate(shapes):
        case = gated_case(
            m, inner, k, TORCH_DTYPES[variant.dtype], HOMES[i % len(HOMES)], bias=i % 2 == 1,
            aligned=i % 3 > 0,
        )  # fmt: skip
        flow(context, case.x, case.w, case.bias, case.out, tiles, gated=True)
        assert torch.equal(case.out, apart(context, flow, case, tiles))
        # gate and up are rounded, and so is what comes of them.
        case.check(roundings=4)


def test_ends_of_the_range(context: LaunchContext) -> None:
    """Gates from -3e4 to 3e4, infinities and NaN: the bits of the activation's kernel."""
    gates = [-3e4, -100.0, -88.0, -1e-6, 0.0, 1e-6, 88.0, 3e4, torch.inf, -torch.inf, torch.nan]
    gate = torch.tensor(gates, device="cuda").bfloat16()
    weight = torch.zeros(2 * len(gates), 8, device="cuda").bfloat16()
    weight[: len(gates), 0], weight[len(gates) :, 1] = gate, 1.0
    x = torch.zeros(1, 8, device="cuda").bfloat16()
    x[0, :2] = 1.0
    w = at_home(weight, "hbm")
    for flow, tiles in ((direct, Tiles(bx=16)), (split, Tiles(bx=16, cluster=2))):
        both = torch.empty(1, 2 * len(gates), dtype=x.dtype, device="cuda")
        out = torch.empty(1, len(gates), dtype=x.dtype, device="cuda")
        flow(context, x, w, None, both, tiles)
        flow(context, x, w, None, out, tiles, gated=True)
        assert torch.equal(out.view(torch.int16), silu_mul(both).view(torch.int16))


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("inner", [1000, 14336])
def test_a_slices_linear_layer(context: LaunchContext, home: str, inner: int) -> None:
    """Any number of rows, whatever multiplies them."""
    linear = Linear(context, Chooser(assumed_h200()))
    for rows in (0, 1, 2, 15, 16, 17, 32, 33, 64, 65, 300):
        case = gated_case(rows, inner, 1032, home=home, bias=rows % 2 == 1)
        got = linear.gated(case.x, case.w, case.bias)
        assert torch.equal(got, silu_mul(linear(case.x, case.w, case.bias)))


@pytest.mark.parametrize("home", HOMES)
def test_a_replayed_launch_reads_the_weight_its_map_says(context: LaunchContext, home: str) -> None:
    cases = [gated_case(5, 1000, 520, home=home) for _ in range(3)]
    for flow, tiles in ((direct, Tiles(bx=16)), (split, Tiles(bx=16, cluster=4))):
        place = torch.zeros(MAP_BYTES, dtype=torch.uint8, device="cuda")
        first = cases[0]
        anywhere = replace(first.w, pointer=0, owner=None, map_pointer=place.data_ptr())
        x, out = first.x.clone(), torch.empty_like(first.out)

        def step(flow=flow, x=x, w=anywhere, out=out, tiles=tiles) -> None:
            flow(context, x, w, None, out, tiles, gated=True)

        place.copy_(_as_tensor(gated_map(first.w)))
        graph = capture(context, torch.cuda.Stream(), [step, step])
        for case in cases:
            place.copy_(_as_tensor(gated_map(case.w)))
            x.copy_(case.x)
            out.fill_(torch.nan)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, apart(context, flow, case, tiles))


def test_gates_take_no_clusters(context: LaunchContext) -> None:
    case = gated_case(300, 128, 64)
    with pytest.raises(OperandError, match="no gate"):
        direct(context, case.x, case.w, None, case.out, Tiles(bx=192, cluster=2), gated=True)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
