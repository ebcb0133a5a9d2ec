"""Every kernel that is built, as data: its source, and the constants it is compiled with.

A variant is compiled once, ahead of serving (`c2cserve kernels build`), and found by its name. The
sizes of its shared memory are computed here, and the device code asserts them when it is compiled.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from c2cserve.core.tensors import HalfDtype


class BuiltKernel(Protocol):
    """What the build compiles: a source, and the constants it is compiled with."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """The file of device code, which is the kernel's name in it, too."""
        ...

    @property
    def defines(self) -> dict[str, str]: ...


Source = Literal["direct", "split", "grouped", "ring", "hybrid"]

SHARED_BYTES = 232_448
"""Dynamic shared memory of a CTA: the maximum of sm_90, for every variant."""
THREADS = 384
"""One producer and two consumer warpgroups."""

DTYPES: tuple[HalfDtype, ...] = ("bfloat16", "float16")
_TYPE = {"bfloat16": "Bf16", "float16": "Fp16"}
_STAGES_MAX = 12
_BW, _BK, _ITEM_BYTES = 128, 64, 2
_BARRIER_BYTES = 512
_EXPERT_TABLE_BYTES = 2 * (512 + 1) * 4 + 64

BX_ALONE = (16, 32, 64, 128, 192, 256)
"""Rows of X in a CTA's tile, if each CTA streams W for itself."""
BX_SHARED = (192, 256)
"""Rows of X in a CTA's tile, if a cluster shares what it streams. Fewer rows need no cluster."""
CLUSTERS = (2, 4, 8)
BX_SPLIT = (16, 32, 64)
"""Rows of X in a CTA's tile, if a cluster shares K, or W holds gate and up."""
CLUSTERS_SPLIT = (2, 3, 4, 8)
"""Sizes of clusters that share K.

Three is for 32 tiles: it has more CTAs than two, and all clusters run at once. 32 clusters of four
do not, on a chip that has groups of SMs of unequal size.
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel. `cluster` lies along M (`split`: along K); the rest as in the source."""

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
        """A unique name, for profilers and `c2cserve kernels list`."""
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
        """The number of tiles of W and X in flight at once: as many as shared memory holds."""
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
        """The macros that the source is compiled with."""
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


@dataclass(frozen=True, slots=True)
class RelayKernel:
    """The kernel that copies between host memory and another GPU's memory (`transfer.gpus`)."""

    pieces: int = 160
    """Contiguous pieces that one launch copies, at most. They are parameters of the launch."""
    threads: int = 512
    name: str = "relay"
    source: str = "relay"

    @property
    def defines(self) -> dict[str, str]:
        return {"PIECES": str(self.pieces), "THREADS": str(self.threads)}


RELAY = RelayKernel()
