"""Each Triton kernel of `kernels.gpu`, once, on tiny shapes: small enough for sanitizers."""

import ast
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from interpreted import DEVICE

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / "kernels"))
from attention_case import Case, layout
from triton_case import close, noise

import c2cserve.kernels.gpu
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.gpu import elementwise
from c2cserve.kernels.gpu.gemm import experts
from c2cserve.kernels.gpu.graph_inputs import GraphInputs
from c2cserve.kernels.gpu.sampling.greedy import greedy, greedy_of
from c2cserve.kernels.gpu.sampling.masks import RowMasks
from c2cserve.kernels.gpu.sampling.sample import asked_of, sample
from c2cserve.kernels.gpu.small_copies import copy_small, copy_small_out
from c2cserve.kernels.layer import TokenRows
from c2cserve.kernels.ops import RowSampling
from c2cserve.kernels.ref import RefOps

pytestmark = pytest.mark.gpu

REF = RefOps()
DTYPE = torch.bfloat16
HIDDEN, VOCAB = 72, 200
"""Multiples of no block."""


def integers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def norms() -> None:
    x, weight = noise(3, HIDDEN).to(DTYPE), noise(HIDDEN, seed=1)
    close(
        elementwise.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5), REF.rms_norm(x, weight, 1e-5)
    )
    residual = x.to(DEVICE, copy=True)
    elementwise.add_rms_norm(x.to(DEVICE), residual, weight.to(DEVICE), 1e-5)
    close(residual, 2 * x.double())


def activation() -> None:
    gate_up = noise(3, 2 * HIDDEN).to(DTYPE)
    close(elementwise.silu_mul(gate_up.to(DEVICE)), REF.silu_mul(gate_up))


def chained_ids() -> None:
    assert elementwise.chained(integers(4, -1, 0, -2), integers(70, 71)).tolist() == [4, 70, 0, 71]


def embedding() -> None:
    table = noise(6, HIDDEN).to(DTYPE)
    got = elementwise.embed(table.to(DEVICE), integers(3, 0, 6), DEVICE).cpu()
    assert torch.equal(got[:2], table[[3, 0]])
    assert got[2].isnan().all()


def experts_sum() -> None:
    routing = experts.route(noise(5, 7), 3, renormalize=True)
    y = noise(15, HIDDEN, seed=1).to(DTYPE)
    places, shares = routing.places.to(DEVICE), routing.weights.to(DEVICE)
    got = elementwise.combine(y.to(DEVICE), places, shares, len(places) + 2)[: len(places)]
    want = torch.einsum("tkh,tk->th", y[routing.places].double(), routing.weights.double())
    close(got, want)


def attention() -> None:
    """Several new tokens, one, and one whose context is read in two pieces; normed heads, too."""
    lengths = [(3, 20), (1, 40), (1, 300)]
    Case(lengths, 4, layout(2, 64)).check()
    Case(lengths, 4, layout(2, 64), window=30, norm=True).check()


def sampling(rows: list[RowSampling], found: Callable[[torch.Tensor], torch.Tensor]) -> None:
    logits = (noise(len(rows), VOCAB) * 4).to(DTYPE)
    ids, _ = greedy_of(found(logits.to(DEVICE)).cpu())
    assert ids == CpuOps(1).sample(logits.float(), rows).ids


def greedy_ids() -> None:
    sampling([RowSampling(0, 0, temperature=0.0)] * 3, greedy)


def drawn_ids() -> None:
    rows = [
        RowSampling(5, 0),
        RowSampling(5, 1, temperature=0.0),
        RowSampling(5, 2, temperature=1.5, top_k=40, top_p=0.8, min_p=0.01),
    ]
    sampling(rows, lambda logits: sample(logits, asked_of(rows).to(DEVICE)))


def masked_ids() -> None:
    """A row with a mask of few tokens, and one without."""
    mask = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
    mask[[0, 3]] = torch.tensor([0b1010_0000, -(1 << 31)], dtype=torch.int32)
    for heat in (0.0, 1.5):
        rows = [RowSampling(5, 0, heat, mask=mask), RowSampling(5, 1, heat)]
        only = RowMasks.of([row.mask for row in rows], DEVICE)
        if not heat:
            sampling(rows, partial(greedy, only=only))
        asked = asked_of(rows).to(DEVICE)
        sampling(rows, partial(sample, asked=asked, only=only))


def graph_inputs() -> None:
    fixed, hidden = GraphInputs.make(3, HIDDEN, 32, DTYPE, DEVICE), noise(2, HIDDEN).to(DTYPE)
    rows = TokenRows(
        integers(5, 17), integers(0, 1, 2), integers(6, 18),
        integers(1, 0, 4, 2, dtype=torch.int64).view(2, 2), integers(21, 70, dtype=torch.int64),
    )  # fmt: skip
    fixed.copy_in(hidden.to(DEVICE), rows)
    assert torch.equal(fixed.hidden.cpu(), hidden[[0, 1, 0]])
    assert fixed.rows.slots.tolist() == [21, 70, 21]


def small_copies() -> None:
    values = torch.arange(3000, dtype=torch.int32)
    for count in (1, 3000, 1 << 17):  # the last is moved by a copy engine
        given = values.repeat(-(-count // 3000))[:count]
        pinned = given.pin_memory() if DEVICE.type == "cuda" else given
        out = torch.full((count + 4,), -1, dtype=torch.int32, device=DEVICE)
        copy_small(pinned, out[:count])
        assert torch.equal(out[:count].cpu(), given)
        assert out[count:].tolist() == [-1] * 4
        back = torch.zeros_like(pinned).pin_memory() if DEVICE.type == "cuda" else pinned.clone()
        copy_small_out(out[:count], back)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(back, given)


CASES: dict[Callable[[], None], set[str]] = {
    norms: {"_norm_kernel"},
    activation: {"_silu_mul_kernel"},
    chained_ids: {"_chained_kernel"},
    embedding: {"_embed_kernel"},
    experts_sum: {"_combine_kernel"},
    attention: {"_rope_store_kernel", "_many_kernel", "_single_kernel"},
    greedy_ids: {"_part_kernel", "_whole_kernel"},
    drawn_ids: {"_sample_kernel"},
    masked_ids: {"_part_kernel", "_whole_kernel", "_sample_kernel"},
    graph_inputs: {"_copy_in_kernel"},
    small_copies: {"_copy_kernel"},
}
"""What runs which kernels."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernels(case: Callable[[], None]) -> None:
    case()


def test_no_kernel_is_missing() -> None:
    [folder] = c2cserve.kernels.gpu.__path__
    there = {
        node.name
        for path in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert there == set().union(*CASES.values())
