"""resident: W in HBM, multiplied by cuBLASLt."""

from collections.abc import Iterator
from functools import cache

from c2cserve.kernels.gpu.gemm.choice.cost import (
    KernelModel,
    Question,
    Speeds,
    cublas_s,
    nothing_from_l2,
)
from c2cserve.kernels.gpu.gemm.dataflow import Dataflow, Launch, Reference
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic


def _candidates(q: Question) -> Iterator[Tiles]:
    if q.home == "hbm" and not q.experts and not q.by_map:
        yield Tiles()


def _traffic(m: int, n: int, k: int, item_bytes: int, tiles: Tiles) -> Traffic:
    return Traffic(0, (m + n) * k * item_bytes, m * n * item_bytes)


def _compute_s(speeds: Speeds, q: Question, tiles: Tiles) -> float:
    return cublas_s(speeds, q)


@cache
def _launcher() -> Launch:
    from c2cserve.kernels.gpu.gemm.launchers.staged import resident_weight

    return resident_weight


def _reference() -> Reference:
    from c2cserve.kernels.gpu.gemm.ref import resident

    return resident


RESIDENT = Dataflow(
    tile_fields=(),
    candidates=_candidates,
    traffic=_traffic,
    model=KernelModel(_traffic, 5e-6, _compute_s, from_l2=nothing_from_l2),
    launcher=_launcher,
    reference=_reference,
)
