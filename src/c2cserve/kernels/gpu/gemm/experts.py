"""A mixture of experts around its grouped GEMMs: choosing experts, sorting rows, adding up.

T tokens, E experts, k = top_k, H hidden. Shapes depend on the number of tokens, not on the router's
choice, and the host reads nothing. So all of it can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The order of the T k (token, expert) pairs. They are sorted by expert, and then by token."""

    tokens: Tensor
    """int64 [T k]: the token of each sorted row."""
    places: Tensor
    """int64 [T, k]: the sorted row of each of a token's choices."""
    offsets: Tensor
    """int32 [E + 1]: where each expert's rows begin; the last is T k."""
    weights: Tensor
    """float32 [T, k]: the factor of each choice in the sum."""

    @property
    def top_k(self) -> int:
        return self.places.shape[1]


def choose(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the k likeliest experts of each token, by logits [T, E] of any float type.

    Return ids int64 [T, k] and weights float32 [T, k]: the k largest of a softmax over all E. With
    `renormalize` (Mixtral, Qwen3-MoE) the k weights sum to 1.
    """
    weights, ids = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights


def by_expert(ids: Tensor, weights: Tensor, experts: int) -> Routing:
    """Sort the pairs that `choose` returned."""
    # A stable sort keeps an expert's tokens in their order, so sums do not depend on the batch.
    chosen, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(chosen, bounds, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return Routing(order // ids.shape[1], places.view_as(ids), offsets, weights)


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> Routing:
    """`choose`, then `by_expert`."""
    return by_expert(*choose(logits, top_k, renormalize=renormalize), logits.shape[1])


def gather(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows of x [T, H] for each pair [T k, H], sorted by expert."""
    return x.index_select(0, routing.tokens)


def combine(y: Tensor, routing: Routing) -> Tensor:
    """Return each token's weighted sum [T, H] of y [T k, H], which is sorted by expert. The sum is
    float32, in the order of the token's choices."""
    chosen = y[routing.places]
    return torch.einsum("tkh,tk->th", chosen.float(), routing.weights).to(y.dtype)
