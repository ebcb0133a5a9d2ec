"""How many prompt tokens go into one prefill step of a model on a slice (C2CServe section 6.3).

Every step streams all weights once, so the largest chunk is the fastest for its own request. But it
keeps the link, the slice and its HBM busy longest, and requests that share them wait. The
*smallest* chunk that still meets the target disturbs least. For each candidate, with `S_X`, `S_O`
the bytes of its activations and outputs and `gamma` how often the dataflow moves them,

    BW_HBM = (gamma_X * S_X + gamma_O * S_O) / TTFT

has to stay within the slice's bandwidth. The paper's TTFT is the time of one chunk; a prompt of `n`
chunks leaves TTFT / n to each.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """One line of the profile of a model on one size of slice: a step of `tokens` prompt tokens,
    alone. It takes `step_s`, with so much of HBM and of compute."""

    tokens: int
    step_s: float
    hbm_bytes: float
    compute_s: float


def hbm_demand(cost: ChunkCost, chunk_s: float) -> float:
    """Bytes per second of HBM the chunk needs to be done in `chunk_s` (section 6.3's formula)."""
    return cost.hbm_bytes / chunk_s


def smallest_chunk(
    profile: Iterable[ChunkCost], prompt_tokens: int, ttft_s: float, hbm_bytes_per_s: float
) -> int | None:
    """Return the smallest chunk with which a prompt gets its first token within `ttft_s`. It asks
    no more of the slice than its HBM's bandwidth and its compute. None: no chunk does. `ttft_s` is
    the time that is left for it, `profile` that of this model on this size of slice, in any
    order."""
    for cost in sorted(profile, key=lambda line: line.tokens):
        chunks = -(-prompt_tokens // cost.tokens)
        chunk_s = ttft_s / chunks
        fits = cost.step_s <= chunk_s and cost.compute_s <= chunk_s
        if chunk_s > 0.0 and fits and hbm_demand(cost, chunk_s) <= hbm_bytes_per_s:
            return cost.tokens
    return None
