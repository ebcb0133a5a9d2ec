"""Every dataflow against float64, over odd shapes, from every home."""

from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from gemm_case import HOMES, at_home, make_case
from torch import Tensor

from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.driver import MAP_BYTES
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS
from c2cserve.kernels.gpu.gemm.launchers.direct import direct, split, weight_map
from c2cserve.kernels.gpu.gemm.launchers.hybrid import hybrid
from c2cserve.kernels.gpu.gemm.launchers.staged import prefetch, resident, ring, tee
from c2cserve.kernels.gpu.gemm.measure import capture
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import OperandError, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DIRECT = sorted({(v.bx, v.cluster) for v in VARIANTS if v.source == "direct" and not v.tee})
SPLIT = sorted({(v.bx, v.cluster) for v in VARIANTS if v.source == "split"})
RING = sorted({(v.bx, v.cluster) for v in VARIANTS if v.source == "ring"})
TEE = sorted({(v.bx, v.cluster) for v in VARIANTS if v.tee})
HYBRID = sorted({(v.bx, v.kp) for v in VARIANTS if v.source == "hybrid"})

WITH_BIAS = {False: 1.0, True: 2.0}
"""cuBLAS rounds before it adds a bias, and again after; our kernels round once."""

SHAPES = [(1, 8, 8), (7, 130, 72), (65, 300, 328), (257, 1000, 520), (1111, 517, 1032)]


@pytest.mark.parametrize(("bx", "cluster"), DIRECT)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_direct(context: LaunchContext, bx: int, cluster: int, dtype: torch.dtype) -> None:
    for i, (m, n, k) in enumerate([*SHAPES, (bx * cluster + 1, 1280, 4096)]):
        case = make_case(m, n, k, dtype, HOMES[i % len(HOMES)], bias=i % 2 == 1, aligned=i % 3 > 0)
        direct(context, case.x, case.w, case.bias, case.out, Tiles(bx=bx, cluster=cluster))
        case.check()


@pytest.mark.parametrize(("bx", "cluster"), SPLIT)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_split(context: LaunchContext, bx: int, cluster: int, dtype: torch.dtype) -> None:
    for i, (m, n, k) in enumerate([*SHAPES, (bx, 40_000, 2048), (3, 257, 8)]):
        case = make_case(m, n, k, dtype, HOMES[i % len(HOMES)], bias=i % 2 == 1, aligned=i % 3 > 0)
        split(context, case.x, case.w, case.bias, case.out, Tiles(bx=bx, cluster=cluster))
        first = case.out.clone()
        case.check()
        split(context, case.x, case.w, case.bias, case.out, Tiles(bx=bx, cluster=cluster))
        assert torch.equal(first, case.out), "the same sums in the same order"


@pytest.mark.parametrize(("bx", "cluster"), RING)
@pytest.mark.parametrize("engines", [False, True])
def test_ring(context: LaunchContext, bx: int, cluster: int, *, engines: bool) -> None:
    for i, (m, n, k) in enumerate([*SHAPES, (700, 5000, 1024), (2049, 4100, 512)]):
        for slots, panel in ((2, 128), (3, 256)):
            home = HOMES[1:][i % (len(HOMES) - 1)] if engines else HOMES[i % len(HOMES)]
            case = make_case(m, n, k, BF16, home, bias=i % 2 == 1)
            tiles = Tiles(bx=bx, cluster=cluster, slots=slots, panel_rows=panel)
            ring(context, case.x, case.w, case.bias, case.out, tiles, engines=engines)
            case.check()


@pytest.mark.parametrize(("bx", "cluster"), TEE)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_tee(context: LaunchContext, bx: int, cluster: int, dtype: torch.dtype) -> None:
    for i, (m, n, k) in enumerate([*SHAPES, (bx * cluster + 777, 1000, 1032)]):
        case = make_case(m, n, k, dtype, HOMES[i % len(HOMES)], bias=i % 2 == 1)
        tee(context, case.x, case.w, case.bias, case.out, Tiles(bx=bx, cluster=cluster))
        case.check(roundings=WITH_BIAS[i % 2 == 1])


@pytest.mark.parametrize(("bx", "kp"), HYBRID)
@pytest.mark.parametrize("partial_bytes", [4, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_hybrid(
    context: LaunchContext, bx: int, kp: int, partial_bytes: Literal[2, 4], alpha: float
) -> None:
    for i, (m, n, k) in enumerate([*SHAPES, (1500, 2056, 2048)]):
        if partial_bytes == 2 and n % 8:
            n -= n % 8
        case = make_case(m, n, k, BF16, HOMES[i % len(HOMES)], bias=i % 2 == 1)
        tiles = Tiles(bx=bx, kp=kp, partial_bytes=partial_bytes, alpha=alpha)
        hybrid(context, case.x, case.w, case.bias, case.out, tiles)
        case.check(roundings=1 if partial_bytes == 4 else 2 * (-(-k // kp)) + 2)


@pytest.mark.parametrize("home", HOMES)
def test_prefetch_takes_any_shape(context: LaunchContext, home: str) -> None:
    for m, n, k in [(1, 3, 5), (65, 333, 77), (300, 2000, 1000)]:
        for tiles in (Tiles(panel_rows=128, panel_growth=1), Tiles(panel_rows=512)):
            case = make_case(m, n, k, BF16, home, bias=m > 1)
            prefetch(context, case.x, case.w, case.bias, case.out, tiles)
            case.check(roundings=WITH_BIAS[m > 1])


def test_weights_in_a_row_do_not_overtake_each_other(context: LaunchContext) -> None:
    """Slots, rings and early starts are reused by the next launch while this one still runs."""
    cases = [make_case(m, 2048, 2048, BF16, "host") for m in (16, 300, 2500, 40, 1000, 2500, 64)]
    for _ in range(3):
        for flow in ("direct", "prefetch", "tee", "ring"):
            for case in cases:
                match flow:
                    case "direct":
                        direct(context, case.x, case.w, None, case.out, Tiles(bx=256, cluster=2))
                    case "prefetch":
                        prefetch(context, case.x, case.w, None, case.out, Tiles(panel_rows=512))
                    case "tee":
                        tee(context, case.x, case.w, None, case.out, Tiles(bx=256, cluster=4))
                    case _:
                        ring(context, case.x, case.w, None, case.out, Tiles(bx=128, slots=2))
            for case in cases:
                case.check()


@pytest.mark.parametrize("home", HOMES)
def test_a_replayed_launch_reads_the_weight_its_map_says(context: LaunchContext, home: str) -> None:
    """One graph, several weights: only the map in GPU memory changes."""
    cases = [make_case(5, 1000, 520, home=home) for _ in range(3)]
    for flow, tiles in ((direct, Tiles(bx=16)), (split, Tiles(bx=16, cluster=4))):
        place = torch.zeros(MAP_BYTES, dtype=torch.uint8, device="cuda")
        first = cases[0]
        anywhere = replace(first.w, pointer=0, owner=None, map_pointer=place.data_ptr())
        x, out = first.x.clone(), torch.empty_like(first.out)

        def step(flow=flow, x=x, w=anywhere, out=out, tiles=tiles) -> None:
            flow(context, x, w, None, out, tiles)

        place.copy_(_as_tensor(weight_map(first.w)))
        graph = capture(context, torch.cuda.Stream(), [step, step])
        for case in cases:
            place.copy_(_as_tensor(weight_map(case.w)))
            x.copy_(case.x)
            out.fill_(torch.nan)
            torch.cuda.synchronize()
            graph.replay()
            case.out.copy_(out)
            case.check()


def test_a_map_in_memory_is_of_whole_boxes(context: LaunchContext) -> None:
    case = make_case(400, 256, 64)
    w = replace(case.w, map_pointer=case.frame.data_ptr())
    with pytest.raises(OperandError, match="clusters"):
        direct(context, case.x, w, None, case.out, Tiles(bx=192, cluster=2))


@pytest.mark.parametrize("home", HOMES[1:])
def test_a_lane_holds_to_its_share_of_the_link(repository: Repository, home: str) -> None:
    """Graphs too, without being captured again; and without a limit it is as fast as before."""
    context, stream = LaunchContext(0, repository), torch.cuda.Stream()
    w = at_home(torch.randn(16384, 4096, device="cuda").bfloat16(), home)
    x = torch.randn(16, 4096, device="cuda").bfloat16()
    out = torch.empty(16, 16384, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(stream):
        context.limit_link(1e12)
    for flow, tiles in ((direct, Tiles(bx=16)), (split, Tiles(bx=16, cluster=2))):
        graph = capture(context, stream, [partial(flow, context, x, w, None, out, tiles)] * 4)

        def taken_s(graph: torch.cuda.CUDAGraph, limit: float) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                context.limit_link(limit)
                graph.replay()
                begin.record()
                graph.replay()
                end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 4e3

        alone = taken_s(graph, 0.0)
        for part in (2, 7):
            limit = w.bytes / alone / part
            assert taken_s(graph, limit) * limit / w.bytes == pytest.approx(1.0, abs=0.06)
        assert taken_s(graph, 0.0) < 1.2 * alone


def test_resident_is_torch(context: LaunchContext) -> None:
    case = make_case(33, 200, 96, bias=True)
    weight = case.w.owner
    assert isinstance(weight, torch.Tensor)
    resident(case.x, weight, case.bias, case.out)
    case.check(roundings=WITH_BIAS[True])


def test_large_shapes(context: LaunchContext) -> None:
    for m, n, k, tiles in [
        (16_384, 4096, 4096, Tiles(bx=256, cluster=8)),
        (10_240, 16_384, 4096, Tiles(bx=256, cluster=8)),
    ]:
        case = make_case(m, n, k, BF16, HOMES[-1])
        direct(context, case.x, case.w, None, case.out, tiles)
        case.check()
        tee(context, case.x, case.w, None, case.out, tiles)
        case.check()
        hybrid(context, case.x, case.w, None, case.out, Tiles(bx=256, alpha=0.25))
        case.check()


def test_handles_know_their_home() -> None:
    case = make_case(4, 16, 16, home="host")
    assert isinstance(case.w, WeightHandle)
    assert (case.w.home, case.w.n, case.w.k, case.w.bytes) == ("host", 16, 16, 512)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
