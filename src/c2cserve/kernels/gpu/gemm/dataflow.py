"""What a dataflow is: one record by which its kernels are built, picked, launched and checked.

A record stands in its own module and in `table.DATAFLOWS`, and nowhere else. Records are plain
arithmetic: torch and the CUDA driver are imported by what `launcher` and `reference` return.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from c2cserve.core.tensors import HalfDtype
from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.gemm.choice.cost import Question, Speeds, Terms
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from c2cserve.kernels.gpu.gemm.ref import Result
    from c2cserve.kernels.gpu.gemm.weight import WeightHandle
    from c2cserve.kernels.gpu.launch_context import LaunchContext

_TMA_ALIGNMENT = 8
"""Elements of 16 bits: TMA wants rows that start at multiples of 16 bytes."""


class Launch(Protocol):
    """out [M, N] = x [M, K] w^T + bias [N], launched on the context's GPU.

    Raises `OperandError`, `KernelMissingError`, `CudaError`.
    """

    def __call__(
        self,
        context: "LaunchContext",
        x: "Tensor",
        w: "WeightHandle",
        bias: "Tensor | None",
        out: "Tensor",
        tiles: Tiles,
        /,
    ) -> None: ...


class Reference(Protocol):
    """The same in plain torch, tile by tile, with its bytes counted.

    Raises ValueError for operands that do not fit.
    """

    def __call__(
        self, x: "Tensor", w: "Tensor", bias: "Tensor | None", tiles: Tiles, /
    ) -> "Result": ...


@dataclass(frozen=True, slots=True)
class Dataflow:
    """One way to compute O[M, N] = X[M, K] W[N, K]^T with W far away."""

    tile_fields: tuple[str, ...]
    """The fields of `Tiles` it reads: points that differ only in the others are of one kind."""
    candidates: Callable[[Question], Iterable[Tiles]]
    """The tiles worth a look for a question; none if it cannot answer it."""
    traffic: Callable[[int, int, int, int, Tiles], Traffic]
    """Bytes of one GEMM, of (m, n, k, bytes of an element, tiles)."""
    model: Callable[[Speeds, Question, Tiles], Terms]
    """Seconds of one GEMM. Raises `ProfileMismatch` for a home without known speeds."""
    launcher: Callable[[], Launch] | None
    """Import and return the launcher. None: its rows need offsets (`Linear.experts`)."""
    reference: Callable[[], Reference] | None
    """Import and return the reference. None: its rows need offsets (`ref_grouped`)."""
    variants: tuple[Variant, ...] = ()
    """The kernels it launches, as they are built ahead of serving."""
    serving: tuple[Variant, ...] = ()
    """Those of them that `serve` launches, and requires."""
    published: bool = False
    """Another system's dataflow, to compare with."""


def streams(q: Question) -> bool:
    """Tell whether one W is to be streamed from afar by TMA, described in the launch itself."""
    return q.home != "hbm" and not q.by_map and one_matrix_by_tma(q)


def one_matrix_by_tma(q: Question) -> bool:
    """Tell whether W is one matrix that TMA can read."""
    return not q.experts and by_tma(q)


def by_tma(q: Question) -> bool:
    """Tell whether rows start where TMA can read them."""
    return q.k % _TMA_ALIGNMENT == 0


def tiles_of(variants: Iterable[Variant]) -> dict[HalfDtype, tuple[Tiles, ...]]:
    """Return the tiles that variants are built for, by dtype, small clusters first.

    Partial sums are float32: 16-bit ones lose precision, so a caller has to ask for them.
    """
    found: dict[HalfDtype, set[Tiles]] = {}
    for one in variants:
        if one.partial_bytes != 2 and not one.gated:
            tiles = Tiles(bx=one.bx, cluster=one.cluster, kp=one.kp or Tiles().kp)
            found.setdefault(one.dtype, set()).add(tiles)
    return {
        dtype: tuple(sorted(tiles, key=lambda tiles: (tiles.cluster, tiles.bx, tiles.kp)))
        for dtype, tiles in found.items()
    }


def fitting(tiles: Iterable[Tiles], sms: int) -> list[Tiles]:
    """Return the tiles whose clusters find room on a slice of `sms` SMs."""
    return [one for one in tiles if one.cluster <= sms]


def covers(tiles: list[Tiles], rows: int) -> list[Tiles]:
    """Return the tiles with the smallest cluster x bx >= rows, else those with the largest.

    W then crosses the link once, and the fewest rows are padding. Among equals, small clusters
    keep more tiles in flight.
    """
    enough = [one.block_rows for one in tiles if one.block_rows >= rows]
    block_rows = min(enough) if enough else max((one.block_rows for one in tiles), default=0)
    return [one for one in tiles if one.block_rows == block_rows]
