"""Placeholder layers that graphs are captured on, and the models that are bound to them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from layer_stacks import CPU, layer_stack, rope
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.engine.gpu import tables
from c2cserve.engine.gpu.layers import SparseHalf
from c2cserve.engine.gpu.tables import (
    GraphBinding,
    ModelTables,
    architecture,
    can_be_bound,
    matrices,
    vectors,
)
from c2cserve.kernels.gpu.driver import MAP_BYTES
from c2cserve.kernels.gpu.gemm.weight import WeightHandle


@pytest.mark.parametrize("kind", [{}, {"biased": True}, {"experts": 4}])
def test_placeholder_layers_read_the_bound_model(kind: dict[str, int]) -> None:
    first, second = layer_stack(1, **kind), layer_stack(2, **kind)
    assert architecture(first) == architecture(second)
    binding = GraphBinding.like(first, CPU)
    rotated = binding.rope(64, rope(1, 40))
    placeholders = binding.placeholder_layers(first, "host")
    for layers, angles in ((second, rope(2, 50)), (first, rope(3, 70))):
        own = ModelTables(layers, CPU)
        own._maps = torch.arange(len(binding.maps), dtype=torch.int64).to(torch.uint8)
        binding.bind(own)
        binding.bind_rope(64, angles)
        for placeholder, layer in zip(placeholders, layers, strict=True):
            for mine, theirs in zip(vectors(placeholder), vectors(layer), strict=True):
                assert mine.data_ptr() != theirs.data_ptr()
                assert torch.equal(mine, theirs)
        assert torch.equal(binding.maps, own.maps)
        length = min(64, len(angles[0]))
        assert torch.equal(rotated[1][:length], angles[1][:length])


def test_longer_contexts_have_tables_of_their_own() -> None:
    """Those of shorter ones stay where they are: graphs know their addresses."""
    layers = layer_stack(1)
    binding = GraphBinding.like(layers, CPU)
    short, long = rope(1, 64), rope(1, 256)
    before = [table.data_ptr() for table in binding.rope(64, short)]
    binding.bind_rope(64, short)
    binding.bind_rope(256, long)
    assert [table.data_ptr() for table in binding.rope(64, long)] == before
    assert torch.equal(binding.rope(256, long)[0], long[0])
    assert torch.equal(binding.rope(64, long)[0], short[0])
    binding.bind_rope(64, long)
    assert torch.equal(binding.rope(64, long)[0], long[0][:64])


def test_every_matrix_has_a_place_of_its_own_for_its_map() -> None:
    layers = layer_stack(1, experts=4)
    binding = GraphBinding.like(layers, CPU)
    handles = [w for layer in binding.placeholder_layers(layers, "peer") for w in matrices(layer)]
    originals = [w for layer in layers for w in matrices(layer)]
    first = binding.maps.data_ptr()
    assert [w.map_pointer for w in handles] == [
        first + i * MAP_BYTES for i in range(len(originals))
    ]
    assert [(w.shape, w.dtype) for w in handles] == [(w.shape, w.dtype) for w in originals]
    assert {(w.home, w.pointer, w.owner) for w in handles} == {("peer", 0, None)}
    assert isinstance(binding.placeholder_layers(layers, "peer")[1].second, SparseHalf)
    assert binding.placeholder_layers(layers, "peer") is not binding.placeholder_layers(
        layers, "hbm"
    )


def test_a_gate_and_what_it_gates_have_a_map_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which their kernels read them; maps lie in the order of the matrices' places."""

    def made(kind: int, w: WeightHandle) -> bytes:
        return bytes([kind]) + w.pointer.to_bytes(MAP_BYTES - 1, "little")

    monkeypatch.setattr(tables, "weight_map", partial(made, 1))
    monkeypatch.setattr(tables, "gated_map", partial(made, 2))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)  # there is no GPU to pin it for
    layers = layer_stack(1, experts=4)
    own = ModelTables(layers, CPU)
    assert own.refresh(None, layers)
    assert not own.refresh(None, layers)
    found = own.maps.view(-1, MAP_BYTES)
    handles = [w for layer in layers for w in matrices(layer)]
    assert found[:, 0].tolist() == [1, 1, 2, 1, 1, 1, 1, 1, 1]
    for w, row in zip(handles, found, strict=True):
        assert int.from_bytes(bytes(row[1:].tolist()), "little") == w.pointer


def test_what_makes_graphs_differ() -> None:
    kind = architecture(layer_stack(1))
    assert kind != architecture(layer_stack(1, layers=3))
    assert kind != architecture(layer_stack(1, biased=True))
    assert kind != architecture(layer_stack(1, inner=104))
    assert kind != architecture(layer_stack(1, experts=4))
    windowed = layer_stack(1)
    windowed[1] = replace(windowed[1], weights=replace(windowed[1].weights, window=8))
    assert kind != architecture(windowed)


def test_rows_that_the_copy_engine_cannot_read_are_launched_one_by_one() -> None:
    assert can_be_bound(layer_stack(1))
    assert not can_be_bound(layer_stack(1, inner=100))


def test_layers_may_have_matrices_at_several_homes() -> None:
    layers = layer_stack(1)
    binding = GraphBinding.like(layers, CPU)
    count = sum(1 for layer in layers for _ in matrices(layer))
    homes: list[Home] = ["host" if i % 3 else "hbm" for i in range(count)]
    mixed = [w for layer in binding.mixed_layers(layers, homes) for w in matrices(layer)]
    alike = [w for layer in binding.placeholder_layers(layers, "hbm") for w in matrices(layer)]
    assert [w.home for w in mixed] == homes
    assert [w.map_pointer for w in mixed] == [w.map_pointer for w in alike]
