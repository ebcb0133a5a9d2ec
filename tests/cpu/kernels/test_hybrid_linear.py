"""The linear layer of C2CServe's GEMMs: what it computes, at which alpha, and what it counts.

The kernel's place is taken by its reference in plain torch, which counts bytes tile by tile.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu.gemm import hybrid_linear
from c2cserve.kernels.gpu.gemm.dataflows.table import DATAFLOWS, DataflowName
from c2cserve.kernels.gpu.gemm.hybrid_linear import HybridGemms, HybridLinear
from c2cserve.kernels.gpu.gemm.ref import Result
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache

GIVEN = settings(
    max_examples=examples(60), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


def weight(n: int, k: int, home: Home = "host", seed: int = 0) -> WeightHandle:
    memory = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return WeightHandle(memory.data_ptr(), (n, k), "bfloat16", home, memory)


class Slice:
    """A linear layer over two models, a weight each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alpha: float, *weights: WeightHandle):
        self.cache = HbmCache(torch.zeros(1 << 12, dtype=torch.uint8), None)
        for name, w in zip("ab", weights, strict=False):
            self.cache.add(name, w.pointer, w.bytes)
        self.gemms = HybridGemms(alpha, self.cache.model_of)
        self.launched: list[tuple[DataflowName, Tiles]] = []
        self.results: list[Result] = []
        monkeypatch.setattr(hybrid_linear, "launch", self._launch)
        monkeypatch.setattr(hybrid_linear, "silu_mul", self._silu_mul)
        context: Any = SimpleNamespace(picked_for=132, device=0)
        chooser: Any = None
        self.linear = HybridLinear(context, chooser, self.cache, self.gemms)

    def _launch(
        self, _context: object, dataflow: DataflowName, tiles: Tiles, x: Tensor, w: WeightHandle,
        bias: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        self.launched.append((dataflow, tiles))
        made = DATAFLOWS[dataflow].reference
        assert made is not None
        assert isinstance(w.owner, Tensor)
        result = made()(x, w.owner, bias, tiles)
        out.copy_(result.out)
        self.results.append(result)

    def _silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up


@GIVEN
@given(
    rows=st.integers(1, 600), n=st.integers(1, 300), k=st.integers(1, 40).map(lambda k: 8 * k),
    alpha=st.integers(0, 32).map(lambda a: a / 32), biased=st.booleans(),
    home=st.sampled_from(["host", "peer"]),
)  # fmt: skip
def test_any_rows_at_any_alpha(
    monkeypatch: pytest.MonkeyPatch, rows: int, n: int, k: int, alpha: float, biased: bool,
    home: Home,
) -> None:  # fmt: skip
    """The product is right, and the bytes counted are those of the kernel, tile by tile."""
    w = weight(n, k, home)
    one = Slice(monkeypatch, alpha, w)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.randn(n).bfloat16() if biased else None
    out = one.linear(x, w, bias)
    assert isinstance(w.owner, Tensor)
    want = x.float() @ w.owner.float().T + (0.0 if bias is None else bias.float())
    torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02 * k**0.5)
    [(dataflow, tiles)] = one.launched
    assert (dataflow, tiles.alpha) == ("hybrid", alpha)
    assert tiles.bx >= min(rows, 256), "W is read as seldom as tiles allow"
    moved, counts = one.results[0].traffic, one.cache.counts
    assert counts.streamed_bytes + one.gemms.reread_bytes == moved.link_bytes
    peer = counts.peer_bytes + one.gemms.reread_peer_bytes
    assert peer == (moved.link_bytes if home == "peer" else 0)
    assert one.gemms.hbm_bytes == moved.hbm_read_bytes + moved.hbm_write_bytes


def test_each_model_has_an_alpha_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = weight(256, 64, seed=1), weight(256, 64, seed=2)
    one = Slice(monkeypatch, 0.25, first, second)
    x = torch.ones(300, 64).bfloat16()

    def alphas() -> list[float]:
        one.launched.clear()
        for w in (first, second):
            one.linear(x, w)
        return [tiles.alpha for _, tiles in one.launched]

    assert alphas() == [0.25, 0.25]
    one.gemms.set_alpha("b", 1.0)
    assert alphas() == [0.25, 1.0]
    one.gemms.forget("b")
    assert alphas() == [0.25, 0.25]
    assert one.gemms.changes == 1


def test_a_larger_alpha_moves_more_over_the_link_and_less_in_hbm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w, found = weight(1024, 512), []
    for alpha in (0.0, 0.5, 1.0):
        one = Slice(monkeypatch, alpha, w)
        one.linear(torch.ones(600, 512).bfloat16(), w)
        found.append((one.gemms.reread_bytes, one.gemms.hbm_bytes))
    assert [again for again, _ in found] == [0, w.bytes, 2 * w.bytes]
    assert found[0][1] > found[1][1] > found[2][1]


def test_gated_is_the_product_and_then_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(256, 64)
    one = Slice(monkeypatch, 0.5, w)
    x = torch.randn(80, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    gate, up = one.linear(x, w).chunk(2, 1)
    assert torch.equal(one.linear.gated(x, w), torch.nn.functional.silu(gate) * up)
    assert one.linear.launched == {"hybrid": 2}


def test_without_rows_nothing_is_launched_or_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(256, 64)
    one = Slice(monkeypatch, 0.5, w)
    assert one.linear(torch.empty(0, 64).bfloat16(), w).shape == (0, 256)
    assert not one.launched
    assert one.cache.counts.streamed_bytes == one.gemms.hbm_bytes == 0
