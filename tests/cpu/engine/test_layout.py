"""Where weights go: at published sizes, against transformers' own modules (without memory)."""

from copy import deepcopy
from functools import cache
from math import prod

import pytest
import torch
import transformers
from published import PARAMETERS, PUBLISHED

from c2cserve.engine.models.config import ModelConfig, parse_config
from c2cserve.engine.models.layout import (
    EMBED,
    HEAD,
    expert_group,
    layer_group,
    layer_tensor,
    plan_layout,
)
from c2cserve.memory.layout import LayoutPlan


def sources(plan: LayoutPlan) -> dict[str, tuple[int, ...]]:
    return {part.source: part.shape for group in plan.groups for part in group.parts}


@cache
def config_of(name: str) -> ModelConfig:
    return parse_config(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_those_of_transformers_modules(name: str) -> None:
    """Its modules hold experts fused; the published per-expert names are checked below."""
    raw = PUBLISHED[name]
    arch = raw["architectures"][0].removesuffix("ForCausalLM")
    config = getattr(transformers, f"{arch}Config")(**deepcopy(raw))
    with torch.device("meta"):
        model = getattr(transformers, f"{arch}ForCausalLM")(config)
    want = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    plan = plan_layout(config_of(name), frozenset(want))
    if config.tie_word_embeddings:
        del want["lm_head.weight"]
    assert sources(plan) == want


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_is_placed_once(name: str) -> None:
    plan = plan_layout(config_of(name))
    plan.check()
    assert sum(prod(shape) for shape in sources(plan).values()) == PARAMETERS[name]
    assert plan.bytes == 2 * PARAMETERS[name]


def test_published_names_of_experts() -> None:
    mixtral = sources(plan_layout(config_of("mixtral-8x7b")))
    block = "model.layers.31.block_sparse_moe"
    assert mixtral[f"{block}.gate.weight"] == (8, 4096)
    assert mixtral[f"{block}.experts.7.w1.weight"] == (14336, 4096)
    assert mixtral[f"{block}.experts.7.w2.weight"] == (4096, 14336)
    assert mixtral[f"{block}.experts.7.w3.weight"] == (14336, 4096)
    qwen = sources(plan_layout(config_of("qwen3-30b-a3b")))
    block = "model.layers.0.mlp"
    assert qwen[f"{block}.gate.weight"] == (128, 2048)
    assert qwen[f"{block}.experts.127.gate_proj.weight"] == (768, 2048)
    assert qwen[f"{block}.experts.127.up_proj.weight"] == (768, 2048)
    assert qwen[f"{block}.experts.127.down_proj.weight"] == (2048, 768)


def test_fused_as_the_operators_want_it() -> None:
    plan = plan_layout(config_of("qwen2.5-0.5b"))
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    assert tensors[layer_tensor(3, "qkv")].shape == ((14 + 2 * 2) * 64, 896)
    assert tensors[layer_tensor(3, "gate_up")].shape == (2 * 4864, 896)
    parts = {part.source: part for group in plan.groups for part in group.parts}
    attention = "model.layers.3.self_attn"
    assert [parts[f"{attention}.{n}_proj.weight"].offset // 896 for n in "qkv"] == [0, 896, 1024]
    assert [parts[f"{attention}.{n}_proj.bias"].offset for n in "qkv"] == [0, 896, 1024]
    mlp = "model.layers.3.mlp"
    assert parts[f"{mlp}.gate_proj.weight"].offset == 0
    assert parts[f"{mlp}.up_proj.weight"].offset == 4864 * 896


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_experts_lie_together_and_load_apart(name: str) -> None:
    config = config_of(name)
    assert config.moe is not None
    plan = plan_layout(config)
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    experts, inner = config.moe.experts, config.moe.intermediate
    assert tensors[layer_tensor(5, "w13")].shape == (experts, 2 * inner, config.hidden)
    assert tensors[layer_tensor(5, "w2")].shape == (experts, config.hidden, inner)
    groups = {group.name: group for group in plan.groups}
    for expert in (0, experts - 1):
        gate, up, down = groups[expert_group(5, expert)].parts
        size = inner * config.hidden
        assert (gate.target, gate.offset) == (layer_tensor(5, "w13"), 2 * expert * size)
        assert (up.target, up.offset) == (layer_tensor(5, "w13"), (2 * expert + 1) * size)
        assert (down.target, down.offset) == (layer_tensor(5, "w2"), expert * size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_loaded_as_a_first_token_needs_it(name: str) -> None:
    config = config_of(name)
    names = [group.name for group in plan_layout(config).groups]
    order = [layer_group(layer) for layer in range(config.layers)] + [HEAD]
    if config.moe is not None:
        order += [
            expert_group(layer, expert)
            for layer in range(config.layers) for expert in range(config.moe.experts)
        ]  # fmt: skip
    assert names == order + ([] if config.tied else [EMBED])


@pytest.mark.parametrize("name", PUBLISHED)
def test_lies_in_execution_order_and_layers_are_aligned(name: str) -> None:
    config = config_of(name)
    tensors = plan_layout(config).tensors
    layers = [t.name.split(".")[1] for t in tensors if t.name.startswith("layers.")]
    assert layers == sorted(layers, key=int)
    starts = [tensor.name for tensor in tensors if tensor.starts_layer]
    assert starts[: config.layers] == [
        layer_tensor(layer, "input_norm") for layer in range(config.layers)
    ]


def test_a_tied_head_that_is_stored_anyway_is_not_an_error() -> None:
    tied, untied = config_of("llama-3.2-1b"), config_of("llama-3.1-8b")
    assert "lm_head.weight" not in sources(plan_layout(tied))
    assert "lm_head.weight" in plan_layout(tied).optional
    assert "lm_head.weight" not in plan_layout(untied).optional
