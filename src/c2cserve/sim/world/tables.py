"""Measured step times of prefills by length, and of decodes by batch and length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LENGTH_STEP = 32
"""Average lengths are rounded to steps of so many tokens, so that lookups can be cached."""

Points = Sequence[tuple[float, float]]


def interpolate(points: Points, x: float) -> float:
    """Interpolate linearly between points of rising x.

    Beyond the last point the last piece goes on. Before the first point its value holds."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    upper, last = 1, len(points) - 1
    while upper < last and points[upper][0] <= x:
        upper += 1
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
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
