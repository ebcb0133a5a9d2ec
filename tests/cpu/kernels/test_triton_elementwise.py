"""Triton's row kernels against float64, over odd shapes."""

import pytest
import torch
from interpreted import DEVICE
from triton_case import DTYPES, close, noise

from c2cserve.kernels.gpu import elementwise
from c2cserve.kernels.gpu.gemm import experts
from c2cserve.kernels.gpu.small_copies import copy_small, copy_small_out
from c2cserve.kernels.ref import RefOps

REF = RefOps()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 72, 100, 1024, 1536])
def test_norms(hidden: int, dtype: torch.dtype) -> None:
    x, weight = (noise(3, hidden) * 3).to(dtype), noise(hidden, seed=1)
    out = elementwise.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5)
    close(out, REF.rms_norm(x, weight, 1e-5))
    before = noise(3, hidden, seed=2).to(dtype)
    residual = before.to(DEVICE, copy=True)
    out = elementwise.add_rms_norm(x.to(DEVICE), residual, weight.to(DEVICE), 1e-6)
    close(residual, before.double() + x.double())
    close(out, REF.rms_norm(residual.cpu(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [4, 100, 1500])
def test_silu_mul(inner: int, dtype: torch.dtype) -> None:
    gate_up = (noise(3, 2 * inner) * 8).to(dtype)
    close(elementwise.silu_mul(gate_up.to(DEVICE)), REF.silu_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, of the interpreter: exp(3e4)
def test_silu_holds_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([[-3e4, -90, -20, -1e-6, 0, 1e-6, 20, 90, 3e4]], dtype=torch.bfloat16)
    gate_up = torch.cat((gate, torch.ones_like(gate)), 1)
    got = elementwise.silu_mul(gate_up.to(DEVICE)).cpu()
    torch.testing.assert_close(got.float(), REF.silu_mul(gate_up), rtol=0.01, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 100, 1500])
def test_embed(hidden: int, dtype: torch.dtype) -> None:
    table = noise(6, hidden).to(dtype)
    ids = torch.tensor([3, 0, 5, 3], dtype=torch.int32)
    got = elementwise.embed(table.to(DEVICE), ids.to(DEVICE), DEVICE)
    assert torch.equal(got.cpu(), table[ids.long()])


def test_an_id_that_is_none_fails_its_own_row_and_reads_nothing() -> None:
    table = noise(6, 40).bfloat16()
    ids = torch.tensor([6, 2, -1, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    got = elementwise.embed(table.to(DEVICE), ids, DEVICE).cpu()
    assert got[[0, 2, 3]].isnan().all()
    assert torch.equal(got[1], table[2])


def test_chained_ids() -> None:
    ids = torch.tensor([4, -1, 0, -3, 2, -1] * 200, dtype=torch.int32, device=DEVICE)
    drawn = torch.tensor([70, 71, -1], dtype=torch.int32, device=DEVICE)
    want = torch.tensor([4, 70, 0, -1, 2, 70] * 200, dtype=torch.int32)
    assert torch.equal(elementwise.chained(ids, drawn).cpu(), want)
    assert torch.equal(REF.chained(ids.cpu(), drawn.cpu()), want)
    assert elementwise.chained(ids[:0], drawn).shape == (0,)


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 1 << 17])
def test_small_copies(count: int) -> None:
    """The last one is larger than what a kernel copies."""
    given = torch.arange(count, dtype=torch.int32) * 7 + 1
    out = torch.full((count + 3,), -1, dtype=torch.int32, device=DEVICE)
    copy_small(given.pin_memory() if DEVICE.type == "cuda" else given, out[:count])
    assert torch.equal(out[:count].cpu(), given)
    assert out[count:].tolist() == [-1] * 3
    back = torch.full((count + 3,), -1, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
    copy_small_out(out[:count], back[:count])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back[:count], given)
    assert back[count:].tolist() == [-1] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: torch.dtype) -> None:
    routing = experts.route(noise(5, 7), 3, renormalize=True)
    y = noise(15, 100, seed=1).to(dtype)
    places, shares = routing.places.to(DEVICE), routing.weights.to(DEVICE)
    got = elementwise.combine(y.to(DEVICE), places, shares, len(places) + 2)[: len(places)]
    want = torch.einsum("tkh,tk->th", y[routing.places].double(), routing.weights.double())
    close(got, want)


def test_nothing_is_nothing() -> None:
    none = torch.empty((0, 64), dtype=torch.bfloat16, device=DEVICE)
    assert elementwise.rms_norm(none, torch.ones(64, device=DEVICE), 1e-5).shape == (0, 64)
    assert elementwise.silu_mul(none).shape == (0, 32)
