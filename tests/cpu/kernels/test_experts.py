"""Routing of a mixture of experts against a loop over tokens."""

from itertools import pairwise

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2cserve.kernels.gpu.gemm.experts import combine, gather, route


def by_hand(x: Tensor, logits: Tensor, w: Tensor, top_k: int, *, renormalize: bool) -> Tensor:
    out = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for token, row in enumerate(logits.double()):
        weights, ids = torch.softmax(row, -1).topk(top_k)
        if renormalize:
            weights = weights / weights.sum()
        for weight, expert in zip(weights, ids, strict=True):
            out[token] += weight * (w[expert].double() @ x[token].double())
    return out


@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=st.integers(1, 40), experts=st.integers(1, 33), top_k=st.integers(1, 8),
    renormalize=st.booleans(), seed=st.integers(0, 999), lopsided=st.booleans(),
)  # fmt: skip
def test_a_layer_of_experts(
    tokens: int, experts: int, top_k: int, renormalize: bool, seed: int, lopsided: bool
) -> None:
    top_k = min(top_k, experts)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16, generator=random)
    w = torch.randn(experts, 8, 16, generator=random)
    logits = torch.randn(tokens, experts, generator=random)
    if lopsided:
        logits[:, experts // 2] += 50
    routing = route(logits, top_k, renormalize=renormalize)
    rows = gather(x, routing)
    bounds = routing.offsets.tolist()
    assert (bounds[0], bounds[-1], routing.offsets.dtype) == (0, tokens * top_k, torch.int32)
    y = torch.empty(tokens * top_k, 8)
    for expert, (first, last) in enumerate(pairwise(bounds)):
        y[first:last] = rows[first:last] @ w[expert].t()
        ordered = routing.tokens[first:last]
        assert torch.equal(ordered, ordered.sort().values), "an expert meets tokens in order"
    torch.testing.assert_close(
        combine(y, routing).double(),
        by_hand(x, logits, w, top_k, renormalize=renormalize), rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    random = torch.Generator().manual_seed(0)
    logits, x = torch.randn(9, 6, generator=random), torch.randn(9, 4, generator=random)
    together = combine(gather(x, whole := route(logits, 2, renormalize=True)), whole)
    for token in range(9):
        alone = route(logits[token : token + 1], 2, renormalize=True)
        assert torch.equal(combine(gather(x[token : token + 1], alone), alone)[0], together[token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32(dtype: torch.dtype) -> None:
    """Choices that nearly cancel would lose all in 16 bits."""
    logits = torch.zeros(1, 3)
    routing = route(logits, 3, renormalize=True)
    y = torch.tensor([[2048.0], [1.0], [-2048.0]], dtype=dtype)
    assert float(combine(y, routing)) == pytest.approx(1 / 3, rel=1e-2)
