"""Prefill budgets of the baselines (`policy.slice.batching.PrefillBudget`)."""

from collections.abc import Iterable

from c2cserve.policy.baselines.c2cserve.chunking import ChunkCost, smallest_chunk
from c2cserve.policy.slice.batching import ActiveModel, Seq

_CHUNK_MIN = 16


def smallest_budget(
    models: Iterable[ActiveModel], model: ActiveModel, first: Seq, now: float, decodes: int,
    most: int,
) -> int:  # fmt: skip
    """Return the smallest chunk by which `first` has its first token in time (C2CServe section
    6.3). Return the largest if there is none, or if step times are unknown. Measured times already
    contain what HBM permits."""
    time = model.time
    if time.prefill_token_s <= 0.0:
        return time.chunk(decodes, 0.0, _CHUNK_MIN, most)
    profile = [
        ChunkCost(size, time.step_s(decodes, size))
        for size in (most >> power for power in range(most.bit_length()))
        if size >= _CHUNK_MIN
    ]
    left_s = max(0.0, first.request.first_token_due_s - now)
    tokens = first.expected - first.issued
    return smallest_chunk(profile, tokens, left_s) or most


def fixed_budget(
    models: Iterable[ActiveModel], model: ActiveModel, first: Seq, now: float, decodes: int,
    most: int,
) -> int:  # fmt: skip
    """Return the largest chunk that the slice takes."""
    return most


def whole_budget(
    models: Iterable[ActiveModel], model: ActiveModel, first: Seq, now: float, decodes: int,
    most: int,
) -> int:  # fmt: skip
    """Return what is left of the most urgent prompt: prompts run one a step."""
    return min(most, first.expected - first.issued)
