"""The kernels for AMX, on a model of its instructions: the same source runs on any CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import RUNNABLE, TILE_MODEL, as_seen

from c2cserve.kernels import build, native
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.ref import RefOps

REF = RefOps()


@pytest.fixture(autouse=True, scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tile-model")
    name = build.library_name(TILE_MODEL)
    build.build(folder, libraries={name: (build.SOURCES, build.tile_model_flags())})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY_FOLDER", folder)
        native.load_library(TILE_MODEL)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


@settings(max_examples=40, deadline=None)
@given(
    m=st.one_of(st.integers(1, 70), st.just(540)),
    n=st.integers(1, 100),
    k=st.sampled_from([1, 31, 32, 64, 130, 544, 1088]),
    biased=st.booleans(),
    data=st.data(),
)
def test_linear(m: int, n: int, k: int, data: st.DataObject, *, biased: bool) -> None:
    """Near float64, nothing written beside the output, and a row's bits are its own."""
    x, w = noise(m, k, seed=m), noise(n, k + 3, seed=n).bfloat16()[:, :k]
    bias = noise(n, seed=k) if biased else None
    one, three = CpuOps(1, isa=TILE_MODEL), CpuOps(3, isa=TILE_MODEL)
    wide = torch.full((m, n + 3), torch.nan)
    whole = three.linear(x, w, bias, wide[:, :n])
    assert off(whole, REF.linear(as_seen(TILE_MODEL, x, w), w, bias)) < 4e-6
    assert wide[:, n:].isnan().all()
    begin = data.draw(st.integers(0, m - 1))
    end = data.draw(st.integers(begin + 1, min(m, begin + 40)))
    assert torch.equal(one.linear(x[begin:end], w, bias), whole[begin:end])
    column = data.draw(st.integers(0, n - 1))
    alone = one.linear(x[begin : begin + 1], w[column : column + 1])
    assert bias is not None or torch.equal(alone[0, 0], whole[begin, column])


def test_panels_of_many_strips() -> None:
    x, w = noise(70, 1100), noise(600, 1100, seed=1).bfloat16()
    whole = CpuOps(3, isa=TILE_MODEL).linear(x, w)
    assert off(whole, REF.linear(as_seen(TILE_MODEL, x, w), w)) < 4e-6
    assert torch.equal(CpuOps(1, isa=TILE_MODEL).linear(x[9:10], w)[0], whole[9])


def test_experts() -> None:
    one, three = CpuOps(1, isa=TILE_MODEL), CpuOps(3, isa=TILE_MODEL)
    x, router = noise(60, 64), noise(60, 5, seed=1)
    w13, w2 = noise(5, 96, 64, seed=2).bfloat16(), noise(5, 64, 48, seed=3).bfloat16()
    ids, weights = three.moe_route(router, 2, True)
    whole = three.moe_experts(x, ids, weights, w13, w2)
    want = REF.moe_experts(as_seen(TILE_MODEL, x, w13), ids, weights, w13, w2)
    assert off(whole, want) < 2.0**-8
    for t in (0, 59):
        row = slice(t, t + 1)
        alone = one.moe_experts(x[row], ids[row], weights[row], w13, w2)
        assert torch.equal(alone[0], whole[t])


def test_what_is_not_a_number_stays_one() -> None:
    x = torch.ones(20, 64)
    x[3, 7] = torch.nan
    w = torch.ones(5, 64, dtype=torch.bfloat16)
    poisoned = CpuOps(1, isa=TILE_MODEL).linear(x, w).isnan().all(1)
    assert poisoned.nonzero().flatten().tolist() == [3]


@pytest.mark.skipif("amx" not in RUNNABLE, reason="this machine has no AMX")
@pytest.mark.parametrize("rows", [1, 20, 100])
def test_the_model_is_the_processor(rows: int) -> None:
    x, w = noise(rows, 1100), noise(130, 1100, seed=1).bfloat16()
    real, model = (CpuOps(2, isa=isa).linear(x, w) for isa in ("amx", TILE_MODEL))
    assert torch.equal(real, model)
