"""Tiles of the dataflows, and the bytes that each dataflow moves, in closed form. Cost models and
benchmarks divide them by bandwidths.

O[M, N] = X[M, K] W[N, K]^T. A tile is counted as TMA fetches it: only what lies inside the tensor.

    HBM bytes    what kernels ask for; an upper bound of what reaches DRAM, as L2 serves a part
    link bytes   exact, as remote lines are not cached
    cuBLAS       each operand once for each call, as its tiles are not known
    not counted  bias and flags (a millionth), multicast and distributed shared memory (on chip)

L2 serves X above all, which every tile of 128 W rows reads anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

BW = 128
"""Rows of W in a tile, on the wgmma M side."""
BK = 64
"""Columns of W and X in one k step."""
_RING_COPIERS = 16
"""CTAs that saturate a link of 400 GB/s; PCIe needs 4."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a launch. A dataflow reads the fields in its record's `tile_fields`."""

    bx: int = 128
    """Rows of X in one CTA's tile."""
    cluster: int = 1
    """CTAs that share each W tile along M (`split`: that share a tile's k steps)."""
    kp: int = 256
    """Columns of the W tile that `asym` pins in shared memory."""
    panel_rows: int = 512
    """Rows of W in a panel of `ring`, and in the first panel of `prefetch`."""
    panel_growth: int = 2
    """`prefetch`: rows of each panel over those of the panel before it."""
    slots: int = 3
    """The number of panels in the ring."""
    alpha: float = 0.5
    """`hybrid`: the share of O's columns that is computed output-stationary."""
    partial_bytes: Literal[2, 4] = 4
    """`asym`: bytes of a partial sum. 4: in a float32 scratch; 2: in O itself, in its own type."""

    def __post_init__(self) -> None:
        if not (8 <= self.bx <= 256 and self.bx % 8 == 0):
            raise ValueError(f"bx must be a multiple of 8 up to 256, not {self.bx}")
        if self.cluster not in (1, 2, 3, 4, 8):
            raise ValueError(f"cluster must be 1, 2, 3, 4 or 8, not {self.cluster}")
        if self.kp < BK or self.kp % BK:
            raise ValueError(f"kp must be a multiple of {BK}, not {self.kp}")
        if self.panel_rows < BW or self.panel_rows % BW:
            raise ValueError(f"panel_rows must be a multiple of {BW}, not {self.panel_rows}")
        if self.panel_growth < 1 or self.slots < 1:
            raise ValueError("panel_growth and slots must be at least 1")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1], not {self.alpha}")

    @property
    def block_rows(self) -> int:
        """Rows of X that one fetch of a W tile serves."""
        return self.cluster * self.bx


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes of one GEMM: W over the link, and HBM read and written."""

    link_bytes: int = 0
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.link_bytes + other.link_bytes,
            self.hbm_read_bytes + other.hbm_read_bytes,
            self.hbm_write_bytes + other.hbm_write_bytes,
        )


def panels(n: int, first_rows: int, growth: int = 1) -> list[tuple[int, int]]:
    """Return [start, stop) of every panel of W's n rows. Each is `growth` times as long as the one
    before."""
    bounds: list[tuple[int, int]] = []
    start, rows = 0, first_rows
    while start < n:
        bounds.append((start, min(start + rows, n)))
        start, rows = start + rows, rows * growth
    return bounds


def ring_copiers(sms: int, cluster: int = 1) -> int:
    """Return how many clusters fill a ring: a quarter of the slice's SMs at most."""
    return max(1, min(_RING_COPIERS, sms // 4) // cluster)


def sym_columns(n: int, alpha: float) -> int:
    """Return the number of O's columns that `hybrid` computes output-stationary.

    It is the number of whole tiles that is nearest to alpha * n. At alpha 1 it is n, and includes a
    tail of any length.
    """
    return n if alpha == 1 else min(n, int(alpha * n / BW + 0.5) * BW)


def grouped_traffic(
    offsets: Sequence[int], n: int, k: int, item_bytes: int, tiles: Tiles
) -> Traffic:
    """Return the bytes of a grouped GEMM: W[e] multiplies rows offsets[e] up to offsets[e + 1].

    An expert without rows costs nothing. An expert's last X tile also reads rows of the next
    expert, as one tensor map covers all of X, but stores only its own. Raises `ValueError` if
    offsets are not those of a partition.
    """
    check_offsets(offsets)
    w, rows = n * k * item_bytes, offsets[-1]
    link_bytes, x_rows = 0, 0
    for start, stop in pairwise(offsets):
        link_bytes += ceil_div(stop - start, tiles.block_rows) * w
        x_rows += min(ceil_div(stop - start, tiles.bx) * tiles.bx, rows - start)
    reads = ceil_div(n, BW) * x_rows * k * item_bytes
    return Traffic(link_bytes, reads, rows * n * item_bytes)


def check_offsets(offsets: Sequence[int]) -> None:
    """Raise `ValueError` unless offsets start at 0 and never fall."""
    if not offsets or offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)):
        raise ValueError("offsets must start at 0 and never fall")


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
