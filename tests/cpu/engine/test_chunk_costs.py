"""Chunks of prompts by the machine's profile, and the chunk rule that reads them."""

from dataclasses import replace
from typing import Any

import pytest

from c2cserve.core.events import ChunkCost
from c2cserve.engine.chunk_costs import chunk_costs
from c2cserve.engine.models.config import ModelConfig, parse_config
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.policy.baselines.c2cserve.chunking import smallest_chunk

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "eos_token_id": 1, "torch_dtype": "bfloat16", "rope_theta": 500000.0,
}  # fmt: skip
CHOOSER = Chooser(assumed_h200())
WEIGHTS = 32 * 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)


@pytest.fixture(scope="module")
def llama() -> ModelConfig:
    return parse_config(LLAMA_8B)


def costs(config: ModelConfig, alpha: float, home: Any = "peer", sms: int = 132) -> list[ChunkCost]:
    return list(chunk_costs(CHOOSER, config, "bfloat16", home, sms, alpha, 2048))


def test_sizes_double_up_to_the_largest_chunk(llama: ModelConfig) -> None:
    assert [one.tokens for one in costs(llama, 0.0)] == [16 << i for i in range(8)]
    [only] = chunk_costs(CHOOSER, llama, "bfloat16", "peer", 132, 0.0, 12)
    assert only.tokens == 12


def test_a_small_chunk_takes_as_long_as_the_weights_need(llama: ModelConfig) -> None:
    for home in ("host", "peer"):
        least_s = WEIGHTS / CHOOSER.link_bytes_per_s(home)
        small = costs(llama, 0.0, home)[0]
        assert 0.9 * least_s < small.step_s < 2.0 * least_s


def test_costs_rise_with_the_chunk_and_hbm_is_busy_for_less(llama: ModelConfig) -> None:
    for alpha in (0.0, 0.5, 1.0):
        found = costs(llama, alpha)
        steps = [one.step_s for one in found]
        assert steps == sorted(steps)
        assert all(0.0 < one.hbm_s <= one.step_s for one in found)


def test_a_larger_alpha_needs_less_of_hbm(llama: ModelConfig) -> None:
    none, all_ = costs(llama, 0.0)[-1], costs(llama, 1.0)[-1]
    assert all_.hbm_s < none.hbm_s


def test_fewer_sms_take_longer(llama: ModelConfig) -> None:
    whole, part = costs(llama, 0.0)[-1], costs(llama, 0.0, sms=16)[-1]
    assert part.step_s > whole.step_s
    assert part.hbm_s > whole.hbm_s


def test_a_mixture_has_the_experts_that_are_chosen(llama: ModelConfig) -> None:
    fields = {
        **LLAMA_8B, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    mixture, dense = costs(parse_config(fields), 0.0)[-1], costs(llama, 0.0)[-1]
    assert mixture.step_s > 2 * dense.step_s


def test_the_rule_asks_hbm_too(llama: ModelConfig) -> None:
    found = costs(llama, 0.0)
    target_s = 1.5 * found[3].step_s
    assert smallest_chunk(found, 100, target_s) == 128
    busy = [replace(one, hbm_s=3 * one.step_s) for one in found]
    assert smallest_chunk(busy, 100, target_s) is None
