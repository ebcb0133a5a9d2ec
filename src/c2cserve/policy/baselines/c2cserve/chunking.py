"""How many prompt tokens go into one prefill step of a model on a slice (C2CServe section 6.3).

Every step streams all weights once, so the largest chunk is the fastest for its own request. But it
keeps the link, the slice and its HBM busy longest, and requests that share them wait. The
*smallest* chunk that still meets the target disturbs least. The paper's TTFT is the time of one
chunk; a prompt of `n` chunks leaves TTFT / n to each.

What a chunk asks of HBM, (gamma_X * S_X + gamma_O * S_O) / TTFT, must not exceed the slice's
bandwidth. With both divided by it: HBM is busy no longer than the chunk may take.
"""

from collections.abc import Iterable

from c2cserve.core.events import ChunkCost


def smallest_chunk(profile: Iterable[ChunkCost], prompt_tokens: int, ttft_s: float) -> int | None:
    """Return the smallest chunk with which a prompt gets its first token within `ttft_s`, the time
    that is left for it. None: no chunk does. `profile` is that of this model on this size of slice,
    in any order."""
    for cost in sorted(profile, key=lambda line: line.tokens):
        chunks = -(-prompt_tokens // cost.tokens)
        if max(cost.step_s, cost.hbm_s) <= ttft_s / chunks:
            return cost.tokens
    return None
