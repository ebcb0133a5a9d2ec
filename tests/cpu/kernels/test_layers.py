"""Whole layers in one call are their operators one by one, bit for bit, and refuse what they do."""

from dataclasses import replace

import pytest
import torch
from levels import EVERY_LEVEL
from small_layers import (
    DIM,
    HEADS,
    HIDDEN,
    KINDS,
    LAYERS,
    WANTED,
    WHOLE,
    Model,
    OneByOne,
    check_wanted,
    layer_weights,
    noise,
)

from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.layer import (
    Experts,
)
from c2cserve.kernels.ref import RefOps


@pytest.mark.parametrize("isa", EVERY_LEVEL)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_is_its_operators_one_by_one(kind: str, dtype: str, isa: str) -> None:
    whole, single = (
        Model.of(CpuOps(3, isa=isa), kind, dtype),
        Model.of(OneByOne(1, isa=isa), kind, dtype),
    )
    got, want = whole.run(WHOLE), single.run(WHOLE)
    assert all(torch.equal(got[s], want[s]) for s in WHOLE)
    assert torch.equal(whole.arena, single.arena)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_agree_with_float64(kind: str) -> None:
    got, want = (Model.of(ops, kind, "float32").run(WHOLE) for ops in (CpuOps(2), RefOps()))
    for s in WHOLE:
        assert (got[s] - want[s]).abs().max() / want[s].abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_batches_and_calls_do_not_matter(kind: str) -> None:
    want = Model.of(CpuOps(3), kind).run(WHOLE)
    model = Model.of(CpuOps(1), kind)
    model.run({0: (0, 5)})
    part = model.run({2: (0, 20), 0: (5, 36)})
    assert torch.equal(part[2], want[2])
    last = model.run({0: (36, 37), 1: (0, 1)})
    assert torch.equal(last[1], want[1])
    assert torch.equal(torch.cat((part[0], last[0])), want[0][5:])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_can_be_run_apart_and_in_halves(kind: str) -> None:
    whole, halves = Model.of(CpuOps(2), kind), Model.of(CpuOps(2), kind)
    single = Model.of(OneByOne(1), kind)
    want = whole.run(WHOLE)
    hidden = torch.cat([noise(64, HIDDEN, seed=s)[a:b] for s, (a, b) in WHOLE.items()])
    rows, rope = whole.rows(WHOLE), whole.rope()
    mine, theirs = hidden.clone(), hidden.clone()
    x = halves.ops.run_attention(mine, halves.layers[0], rows, rope, halves.arena)
    y = single.ops.run_attention(theirs, single.layers[0], rows, rope, single.arena)
    assert torch.equal(mine, theirs)
    assert torch.equal(x, y)
    for layer in whole.layers:
        whole.ops.run_layers(hidden, [layer], rows, rope, whole.arena)
    assert torch.equal(hidden, torch.cat(list(want.values())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", WANTED)
def test_rows_that_are_not_wanted_change_no_others(kind: str, wanted: tuple[int, ...]) -> None:
    check_wanted(CpuOps(2), kind, wanted)


# ---- refusals ----------------------------------------------------------------------------------


def test_matrices_that_make_no_layer() -> None:
    ops, good = CpuOps(1), layer_weights("biases", 0)
    shape = Model.of(ops, "dense").layers[0].shape
    sparse = layer_weights("experts", 0)
    assert isinstance(sparse.mlp, Experts)
    bad = {
        "norms do not fit": replace(good, input_norm=torch.ones(HIDDEN - 1)),
        r"\[80, 40\] was expected": replace(good, qkv=torch.zeros(79, HIDDEN).bfloat16()),
        "dense torch.bfloat16": replace(good, o=torch.zeros(HIDDEN, HEADS * DIM)),
        "bias of 80 float32": replace(good, qkv_bias=torch.zeros(80).half()),
        "6 of 5 experts": replace(sparse, mlp=replace(sparse.mlp, per_token=6)),
    }
    for says, weights in bad.items():
        with pytest.raises(ValueError, match=says):
            ops.prepare(0, weights, shape)
    with pytest.raises(ValueError, match="its place"):
        ops.prepare(LAYERS, good, shape)


def test_layers_of_other_models_or_operators() -> None:
    mine, other, ref = (Model.of(o, "dense") for o in (CpuOps(1), CpuOps(1), RefOps()))
    for layers in ([mine.layers[0], other.layers[1]], ref.layers):
        with pytest.raises(ValueError, match="of another model, or of other operators"):
            Model(mine.ops, layers, mine.arena).run(WHOLE)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("positions", torch.full((37,), 64, dtype=torch.int32), "token 0 has position 64 of 64"),
        ("slots", torch.full((37,), -1), "slot -1"),
        ("context_len", torch.tensor([49], dtype=torch.int32), "sequence 0 of 49 tokens"),
        ("block_table", torch.full((1, 3), 1 << 40), "sequence 0 of 37 tokens"),
        ("positions", torch.zeros(37), "dense torch.int32"),
        ("slots", torch.zeros(36, dtype=torch.int64), r"\[37\] was expected"),
    ],
)
def test_rows_outside_of_what_there_is(field: str, value: torch.Tensor, says: str) -> None:
    model = Model.of(CpuOps(1), "dense")
    hidden = torch.ones(37, HIDDEN)
    rows = replace(model.rows({0: (0, 37)}), **{field: value})
    with pytest.raises(ValueError, match=says):
        model.ops.run_layers(hidden, model.layers, rows, model.rope(), model.arena)
    with pytest.raises(ValueError, match=says):
        model.ops.run_attention(hidden, model.layers[0], rows, model.rope(), model.arena)
    assert (hidden == 1).all(), "nothing is written then"
    assert not model.arena.any()


@pytest.mark.parametrize("wanted", [[-1], [37], [3, 3], [4, 2]])
def test_wanted_rows_that_are_not_there_or_not_in_order(wanted: list[int]) -> None:
    model, hidden = Model.of(CpuOps(1), "dense"), torch.ones(37, HIDDEN)
    rows, picked = model.rows({0: (0, 37)}), torch.tensor(wanted)
    with pytest.raises(ValueError, match="is wanted: not one of 37 in order"):
        model.ops.run_layers(hidden, model.layers, rows, model.rope(), model.arena, picked)
    assert (hidden == 1).all(), "nothing is written then"


def test_values_that_are_not_numbers_choose_no_experts() -> None:
    model = Model.of(CpuOps(1), "experts")
    hidden = torch.full((1, HIDDEN), torch.nan)
    rows = model.rows({1: (0, 1)})
    with pytest.raises(ValueError, match="token 0 chose an expert twice"):
        model.ops.run_layers(hidden, model.layers, rows, model.rope(), model.arena)
