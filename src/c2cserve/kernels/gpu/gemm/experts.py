"""A mixture of experts around its grouped GEMMs: choosing, sorting rows by expert, adding up.

Shapes depend on how many tokens there are, never on what the router chose, and nothing is read
back: all of it can be captured in a CUDA graph. T tokens, E experts, k = top_k, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Where each of the T k (token, expert) pairs went. Pairs are sorted by expert and, within an
    expert, by token."""

    tokens: Tensor
    """int64 [T k]: the token of each sorted row."""
    places: Tensor
    """int64 [T, k]: the sorted row of each of a token's choices."""
    offsets: Tensor
    """int32 [E + 1]: where each expert's rows begin; the last is T k."""
    weights: Tensor
    """float32 [T, k]: how much of each choice goes into the sum."""

    @property
    def top_k(self) -> int:
        return self.places.shape[1]


def choose(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The k likeliest experts of each token, ids int64 [T, k] and weights float32 [T, k], of logits
    [T, E] of any float type: softmax over all E in float32, then the k largest, made to sum to 1
    if `renormalize` (Mixtral, Qwen3-MoE)."""
    weights, ids = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights


def by_expert(ids: Tensor, weights: Tensor, experts: int) -> Routing:
    """Sort what `choose` found."""
    # Stable, so that an expert meets its tokens in their order: sums do not depend on the batch.
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
    """x [T, H] -> [T k, H], sorted by expert."""
    return x.index_select(0, routing.tokens)


def combine(y: Tensor, routing: Routing) -> Tensor:
    """y [T k, H], sorted by expert -> [T, H]: each token's choices, weighed and summed in float32
    in the order of its choices."""
    chosen = y[routing.places]
    return torch.einsum("tkh,tk->th", chosen.float(), routing.weights).to(y.dtype)
