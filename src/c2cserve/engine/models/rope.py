"""Rotary position embedding: cos and sin tables for every scaling in use.

Definitions: position interpolation (arXiv 2306.15595), NTK-aware ("dynamic"), YaRN (arXiv
2309.00071), LongRoPE (arXiv 2402.13753), and Llama 3.1's own, as transformers implements them.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from c2cserve.engine.models.config import ModelConfig, Rope
from c2cserve.engine.models.placing import placed, release

_FIRST_LENGTH = 2048


class RopeTables:
    """Tables of cos and sin, float32 [length, head_dim / 2], which grow as sequences do.

    Tables for the longest context of a 128k model would take 64 MiB, for each model and worker.
    The frequencies are fixed for the longest context that is served: "dynamic" and "longrope" scale
    by it. So tables and answers never change as a sequence grows.
    """

    def __init__(
        self, config: ModelConfig, longest: int, device: torch.device | None = None
    ) -> None:
        """`device`: where the tables are kept, None for the host."""
        self._device = device
        self._frequencies, self._factor = _frequencies(config, longest)
        self._longest = longest
        self._made = 0
        self._tables = self._make(min(_FIRST_LENGTH, longest))

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """Return tables of at least `length` positions. Raises ValueError beyond the longest."""
        if length > self._longest:
            raise ValueError(f"a context of {length} tokens, at most {self._longest} are served")
        if length > self._made:
            for table in self._tables:  # launched steps may read them
                release(table)
            self._tables = self._make(min(self._longest, max(length, 2 * self._made)))
        return self._tables

    def _make(self, length: int) -> tuple[Tensor, Tensor]:
        self._made = length
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies.float())
        cos, sin = (angles.cos() * self._factor, angles.sin() * self._factor)
        return placed(cos.contiguous(), self._device), placed(sin.contiguous(), self._device)


def _frequencies(config: ModelConfig, length: int) -> tuple[Tensor, float]:
    rope, dim = config.rope, config.head_dim
    scaling = rope.scaling
    plain = _inverse(rope.theta, dim)
    match rope.type:
        case "linear":
            return plain / float(scaling["factor"]), 1.0
        case "dynamic":
            trained, factor = config.max_position, float(scaling["factor"])
            stretch = factor * max(length, trained) / trained - (factor - 1)
            base = rope.theta * stretch ** (dim / (dim - 2))
            return _inverse(base, dim), 1.0
        case "llama3":
            return _llama3(plain, scaling, config.max_position), 1.0
        case "yarn":
            return _yarn(rope, dim, config.max_position)
        case "longrope":
            return _longrope(plain, scaling, config.max_position, length)
        case _:
            return plain, 1.0


def _inverse(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _llama3(plain: Tensor, scaling: Mapping[str, Any], max_position: int) -> Tensor:
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = int(scaling.get("original_max_position_embeddings") or max_position)
    wavelength = 2 * math.pi / plain
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(rope: Rope, dim: int, max_position: int) -> tuple[Tensor, float]:
    scaling = rope.scaling
    original = int(scaling.get("original_max_position_embeddings") or max_position)
    factor = float(scaling.get("factor") or max_position / original)

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = (
            magnitude(factor, float(mscale)) / magnitude(factor, float(all_dim))
            if mscale and all_dim
            else magnitude(factor)
        )

    def turns_at(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = (turns_at(float(scaling.get(key) or default))
                 for key, default in (("beta_fast", 32), ("beta_slow", 1)))  # fmt: skip
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    plain = _inverse(rope.theta, dim)
    return plain / factor * (1 - keep) + plain * keep, float(attention)


def _longrope(
    plain: Tensor, scaling: Mapping[str, Any], max_position: int, length: int
) -> tuple[Tensor, float]:
    original = int(scaling.get("original_max_position_embeddings") or max_position)
    factor = float(scaling.get("factor") or max_position / original)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = scaling["long_factor" if length > original else "short_factor"]
    return plain / torch.tensor(divisors, dtype=torch.float32), float(attention)
