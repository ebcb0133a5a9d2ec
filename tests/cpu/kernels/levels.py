"""The CPU kernels' levels: one library for each instruction set."""

import pytest
import torch

from c2cserve.kernels.native import ISAS, ROUNDING_ISAS, best_isa, usable_flags

RUNNABLE = [isa for isa in ISAS if best_isa(usable_flags(), isa) == isa]
"""What this machine has, best first."""

TILE_MODEL = "tile_model"
"""The level `amx` on a model of its instructions (`tile_model.h`)."""

EVERY_LEVEL = [
    pytest.param(
        isa, marks=pytest.mark.skipif(isa not in RUNNABLE, reason=f"this machine has no {isa}")
    )
    for isa in ISAS
]


def rounds(isa: str, weights: torch.dtype) -> bool:
    """Return whether activations are rounded to bfloat16 where they meet such weights."""
    return weights is torch.bfloat16 and isa in {*ROUNDING_ISAS, TILE_MODEL}


def as_seen(isa: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return activations as `linear` multiplies them with `w`."""
    return x.bfloat16().float() if rounds(isa, w.dtype) else x
