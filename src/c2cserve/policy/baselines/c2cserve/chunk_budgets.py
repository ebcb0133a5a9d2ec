"""Prefill budgets of the baselines (`policy.slice.batching.PrefillBudget`)."""

from collections.abc import Iterable

from c2cserve.core.events import ChunkCost, ChunksProfiled
from c2cserve.policy.baselines.c2cserve.chunking import smallest_chunk
from c2cserve.policy.slice.batching import ActiveModel, Seq

_CHUNK_MIN = 16


def smallest_budget(
    models: Iterable[ActiveModel], model: ActiveModel, first: Seq, now: float, decodes: int,
    most: int,
) -> int:  # fmt: skip
    """Return the smallest chunk by which `first` has its first token in time (C2CServe section
    6.3). Return the largest if there is none, and a small one while step times are unknown.
    Measured times already contain what HBM permits."""
    time = model.time
    if not time.knows_prompts:
        return time.chunk(decodes, 0.0, _CHUNK_MIN, most)
    profile = [
        ChunkCost(size, time.step_s(decodes, size), 0.0)
        for size in (most >> power for power in range(most.bit_length()))
        if size >= _CHUNK_MIN
    ]
    left_s = max(0.0, first.request.first_token_due_s - now)
    tokens = first.expected - first.issued
    return smallest_chunk(profile, tokens, left_s) or most


class ProfiledChunks:
    """The smallest chunk by the machine's profile; by learned step times for models without one.

    On GPU slices of a server all models have one, on CPU slices and in simulations none.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[ChunkCost, ...]] = {}

    def take(self, event: ChunksProfiled) -> None:
        self._chunks[event.model] = event.chunks

    def __call__(
        self, models: Iterable[ActiveModel], model: ActiveModel, first: Seq, now: float,
        decodes: int, most: int,
    ) -> int:  # fmt: skip
        chunks = self._chunks.get(model.name)
        if chunks is None:
            return smallest_budget(models, model, first, now, decodes, most)
        left_s = max(0.0, first.request.first_token_due_s - now)
        tokens = first.expected - first.issued
        return smallest_chunk((one for one in chunks if one.tokens <= most), tokens, left_s) or most


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
