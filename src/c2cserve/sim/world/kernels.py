"""Measured times of a GPU's kernels, which a step of a dense model is made of.

    step = GEMMs of all layers + attention of all layers + GEMM of the output + activations

Kernels run one after the other. So each has its own bound, and their times add up. GEMMs are looked
up by rows and bytes of weights. Attention of decodes goes by the bytes of keys and values of a
layer, that of prompts by FLOP. Times between measured points are on lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from c2cserve.sim.world.shapes import Shape
from c2cserve.sim.world.tables import Points, interpolate


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Kernels of one GPU, with all of its SMs. Seconds."""

    sms: int
    gemm: Sequence[tuple[float, Points]]
    """(rows, [(bytes of weights, seconds)])."""
    decodes: Points
    """(bytes of keys and values of a layer, seconds) of batches."""
    one_decode: Points
    """The same of one sequence alone, which few SMs read. A batch takes no less than its longest
    sequence."""
    prompts: Points
    """(FLOP of a layer, seconds)."""
    memory_speed: float = 1.0
    """How many times as fast memory is as it was measured,"""
    compute_speed: float = 1.0
    """and arithmetic. (Experiments of `sim.planning`.)"""
    _gemms: dict[tuple[int, float], float] = field(
        default_factory=dict[tuple[int, float], float], compare=False
    )
    """What was computed before."""

    def faster(self, memory: float, compute: float) -> "KernelTimes":
        """Return the same with memory and arithmetic so many times as fast."""
        return KernelTimes(
            self.sms, self.gemm, self.decodes, self.one_decode, self.prompts,
            self.memory_speed * memory, self.compute_speed * compute,
        )  # fmt: skip

    def layers_s(self, shape: Shape, rows: int) -> float:
        """Return the seconds of all GEMMs of a model's layers."""
        each = sum([self.gemm_s(rows, size) for size in linear_bytes(shape)])
        return shape.layers * each

    def gemm_s(self, rows: int, weight_bytes: float) -> float:
        """Return the seconds of one GEMM. What it takes for one row is that of reading weights."""
        key = rows, weight_bytes
        known = self._gemms.get(key)
        if known is None:
            by_rows = [(at, interpolate(points, weight_bytes)) for at, points in self.gemm]
            least_s = by_rows[0][1]
            more_s = interpolate(by_rows, rows) - least_s
            known = least_s / self.memory_speed + more_s / self.compute_speed
            self._gemms[key] = known
        return known

    def decodes_s(self, kv_bytes: float, longest_bytes: float) -> float:
        """Return the seconds of one layer's attention of decodes."""
        batch_s = interpolate(self.decodes, kv_bytes)
        return max(batch_s, interpolate(self.one_decode, longest_bytes)) / self.memory_speed

    def prompts_s(self, flop: float) -> float:
        """Return the seconds of one layer's attention of prompts."""
        return interpolate(self.prompts, flop) / self.compute_speed


def linear_bytes(shape: Shape) -> tuple[float, float, float, float]:
    """Return the weights of a layer's four GEMMs: query, key and value; output; gate and up; down.

    A dense model's hidden size is that of its heads together."""
    hidden = shape.heads * shape.head_dim
    qkv = hidden * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    out = hidden * hidden
    mlp = shape.layer_parameters / shape.layers - qkv - out
    size = shape.item_bytes
    return float(size * qkv), float(size * out), size * mlp * 2 / 3, size * mlp / 3


def read_kernels(raw: Mapping[str, Any]) -> KernelTimes:
    """Read times in the form of `data/tables/*_kernels.json`, in microseconds.

    Raises KeyError, ValueError."""
    gemm = sorted((float(row["rows"]), _points(row["us"])) for row in raw["gemm"])
    attention = raw["attention"]
    return KernelTimes(
        int(raw["sms"]), gemm, _points(attention["decodes_us"]),
        _points(attention["one_decode_us"]), _points(attention["prompts_us"]),
    )  # fmt: skip


def _points(pairs: Sequence[Sequence[float]]) -> Points:
    return sorted((float(x), us / 1e6) for x, us in pairs)
