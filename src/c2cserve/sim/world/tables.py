"""Measured times: of a model's steps on a device, and of a GPU's kernels.

Steps are prefills by length, and decodes by batch and length. Where only kernels were measured,
steps of dense models are made of these:

    step = layers * (GEMMs + attention + others) + GEMM of the output + activations

Kernels run one after the other. So each has its own bound, and their times add up. GEMMs are looked
up by rows and bytes of weights. Attention of decodes goes by the bytes of keys and values of a
layer, that of prompts by FLOP. Times between measured points are on lines. All are times at the
full clock. Power limits it (`PowerLimit`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from c2cserve.core.value import value
from c2cserve.sim.world.shapes import Shape

_LENGTH_STEP = 32
"""Average lengths are rounded to steps of so many tokens, so that lookups can be cached."""

Points = list[tuple[float, float]]


def interpolate(points: Points, x: float) -> float:
    """Interpolate linearly between points of rising x.

    Beyond the last point the last piece goes on. Before the first point its value holds."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    upper, last = 1, len(points) - 1
    while upper < last and points[upper][0] <= x:
        upper += 1
    x0, y0 = points[upper - 1]
    x1, y1 = points[upper]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


@dataclass(slots=True)
class StepTable:
    """One model on one device, seconds."""

    prefill: Points
    """(prompt tokens, seconds)."""
    decode: Sequence[tuple[float, Points]]
    """(average length, [(batch, seconds)])."""
    base_s: float
    """Fixed cost of a step. Prompts and decodes in one step pay it once."""
    _prefills: dict[int, float] = field(default_factory=dict[int, float])
    _decodes: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def prefill_s(self, start: int, tokens: int) -> float:
        """Return the seconds of `tokens` tokens after `start` cached ones.

        It is the difference of both prompts, but no less than the time of the tokens alone."""
        alone = self._prompt_s(tokens)
        if not start:
            return alone
        return max(alone, self._prompt_s(start + tokens) - self._prompt_s(start))

    def _prompt_s(self, tokens: int) -> float:
        known = self._prefills.get(tokens)
        if known is None:
            known = self._prefills[tokens] = interpolate(self.prefill, tokens)
        return known

    def decode_s(self, batch: int, mean_length: float) -> float:
        key = (batch, int(mean_length) // _LENGTH_STEP)
        known = self._decodes.get(key)
        if known is None:
            length = (key[1] + 0.5) * _LENGTH_STEP
            by_length = [(at, interpolate(points, batch)) for at, points in self.decode]
            known = self._decodes[key] = interpolate(by_length, length)
        return known


@dataclass(frozen=True, slots=True)
class Tables:
    """Step tables by model, then device."""

    steps: Mapping[str, Mapping[str, StepTable]]

    def get(self, model: str, device: str) -> StepTable | None:
        return self.steps.get(model, {}).get(device)


def read_tables(raw: Mapping[str, Any]) -> Tables:
    """Read tables in the form of `data/tables`, in milliseconds.

    The default of `base_ms` is the time of one token. Raises KeyError, ValueError."""
    return Tables(
        {
            model: {device: _table(row) for device, row in devices.items()}
            for model, devices in raw["models"].items()
        }
    )


def _table(row: Mapping[str, Any]) -> StepTable:
    prefill = sorted((float(tokens), ms / 1e3) for tokens, ms in row["prefill_ms"])
    decode = sorted(
        (float(length), sorted((float(batch), ms / 1e3) for batch, ms in points))
        for length, points in row["decode_ms"].items()
    )
    base_s = row["base_ms"] / 1e3 if "base_ms" in row else prefill[0][1]
    return StepTable(prefill, decode, base_s)


@value
class PowerLimit:
    """What power does to a GPU's clock.

        arithmetic   [ prompt ........ ][ prompt ........ ]                 [ prompt ...
        clock        ~~~~~\\____________ __________________ ____/~~~~~~~~~~~ ~~~~~\\_____

    Tensor cores that are busy take more than the GPU may. So its clock falls, and rises when they
    rest. Steps that wait for memory take no longer meanwhile."""

    sustained: float = 1.0
    """How many times as long arithmetic takes at the clock that power sustains; 1: no limit."""
    settle_s: float = 1.0
    """The clock approaches its end as exp(-t / settle_s), both ways."""


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
    others_s: float = 0.0
    """A layer's norms, activations and launches, whatever the number of tokens."""
    power: PowerLimit = PowerLimit()
    memory_speed: float = 1.0
    """How many times as fast memory is as it was measured,"""
    compute_speed: float = 1.0
    """and arithmetic. (Experiments of `sim.planning`.)"""
    _gemms: dict[tuple[int, float], float] = field(
        default_factory=dict[tuple[int, float], float], compare=False
    )
    """What was computed before,"""
    _layers: dict[str, dict[int, float]] = field(
        default_factory=dict[str, dict[int, float]], compare=False
    )
    """and of shapes, by their names."""

    def faster(self, memory: float, compute: float) -> "KernelTimes":
        """Return the same with memory and arithmetic so many times as fast. All else gains what
        both do."""
        return KernelTimes(
            self.sms, self.gemm, self.decodes, self.one_decode, self.prompts,
            self.others_s / min(memory, compute), self.power,
            self.memory_speed * memory, self.compute_speed * compute,
        )  # fmt: skip

    def layers_s(self, shape: Shape, rows: int) -> float:
        """Return the seconds of all GEMMs of a model's layers."""
        known = self._layers.get(shape.name)
        if known is None:
            known = self._layers[shape.name] = {}
        found = known.get(rows, 0.0)
        if not found:
            each = sum([self.gemm_s(rows, size) for size in linear_bytes(shape)])
            found = known[rows] = shape.layers * each
        return found

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
        float(raw["others_us"]) / 1e6,
        PowerLimit(float(raw["power"]["sustained"]), float(raw["power"]["settle_s"])),
    )  # fmt: skip


def _points(pairs: Sequence[Sequence[float]]) -> Points:
    return sorted((float(x), us / 1e6) for x, us in pairs)
