"""Every kernel that is built, as data: what source, compiled with which numbers.

A variant is compiled once, ahead of serving (`c2cserve kernels build`), and found by its name. The
sizes of its shared memory are worked out here and held against the device code when it compiles.
"""

from dataclasses import dataclass
from typing import Literal

from c2cserve.core.tensors import HalfDtype

Source = Literal["direct", "split", "grouped", "ring", "hybrid"]

SHARED_BYTES = 232_448
"""Dynamic shared memory of a CTA: all that sm_90 gives one, for every variant."""
THREADS = 384
"""One producer and two consumer warpgroups."""

DTYPES: tuple[HalfDtype, ...] = ("bfloat16", "float16")
_TYPE = {"bfloat16": "Bf16", "float16": "Fp16"}
_STAGES_MAX = 12
_BW, _BK, _ITEM_BYTES = 128, 64, 2
_BARRIER_BYTES = 512
_EXPERT_TABLE_BYTES = 2 * (512 + 1) * 4 + 64

BX_ALONE = (16, 32, 64, 128, 192, 256)
"""Rows of X in a CTA's tile where a CTA streams for itself."""
BX_SHARED = (192, 256)
"""And where a cluster shares what it streams: fewer rows need no cluster."""
CLUSTERS = (2, 4, 8)
BX_SPLIT = (16, 32, 64)
"""And of few rows, where a cluster shares K, or W is a gate and what it gates."""
CLUSTERS_SPLIT = (2, 3, 4, 8)
"""Clusters that share K. Three: of 32 tiles, more CTAs than two, and all of them run at once, which
32 clusters of four do not on a chip some of whose groups of SMs are smaller."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel. `cluster` is along M (`split`: along K); the rest as in the source."""

    source: Source
    dtype: HalfDtype
    bx: int
    cluster: int = 1
    tee: bool = False
    kp: int = 0
    partial_bytes: Literal[0, 2, 4] = 0
    gated: bool = False

    @property
    def name(self) -> str:
        """Unique, and readable in profilers' and `kernels list`'s output."""
        parts = [self.source, self.dtype, f"x{self.bx}"]
        if self.cluster > 1:
            parts.append(f"c{self.cluster}")
        if self.tee:
            parts.append("tee")
        if self.gated:
            parts.append("gated")
        if self.source == "hybrid":
            parts += [f"k{self.kp}", f"p{8 * self.partial_bytes}"]
        return "-".join(parts)

    @property
    def stages(self) -> int:
        """How many tiles of W and X are on their way at once: as many as shared memory holds."""
        stage = (_BW + self.bx) * _BK * _ITEM_BYTES
        staging = 2 * min(self.bx, 64) * 64 * _ITEM_BYTES
        room = SHARED_BYTES - staging - _BARRIER_BYTES - self._extra_bytes
        return min(_STAGES_MAX, room // stage)

    @property
    def _extra_bytes(self) -> int:
        match self.source:
            case "split":
                return self.bx * (_BW + 4) * 4
            case "grouped":
                return _EXPERT_TABLE_BYTES
            case _:
                return 0

    @property
    def defines(self) -> dict[str, str]:
        """What the source is compiled with."""
        defines: dict[str, str | int] = {
            "TYPE": _TYPE[self.dtype],
            "BX": self.bx,
            "STAGES": self.stages,
            "SHARED_BYTES": SHARED_BYTES,
        }
        match self.source:
            case "direct":
                tee, gated = int(self.tee), int(self.gated)
                defines |= {"CLUSTER": self.cluster, "TEE": tee, "GATED": gated}
            case "split":
                defines |= {"CLUSTER": self.cluster, "GATED": int(self.gated)}
            case "hybrid":
                defines |= {"KP": self.kp, "PARTIAL": self.partial_bytes}
            case _:
                defines |= {"CLUSTER": self.cluster}
        return {name: str(value) for name, value in defines.items()}
