"""Shapes of published models, for benchmarks that fill them with random weights."""

from typing import Any

from c2cserve.engine.models.config import ModelConfig, parse_config
from c2cserve.engine.models.layout import plan_layout

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 5e5,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
    "rope_theta": 1e6, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "rope_theta": 1e6,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 512,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3b": {
        **_LLAMA, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "qwen3-14b": {
        **_QWEN3, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
        "intermediate_size": 17408,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "llama-1b": {
        **_LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "mistral-7b": {
        **_LLAMA, "architectures": ["MistralForCausalLM"], "vocab_size": 32768,
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 14336, "sliding_window": 4096,
    },
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        **_QWEN2, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
    "qwen2.5-1.5b": {
        **_QWEN2, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "intermediate_size": 8960,
    },
    "tiny-llama": {**_LLAMA, **_TINY},
    "tiny-qwen2": {**_QWEN2, **_TINY},
    "tiny-qwen3": {**_QWEN3, **_TINY, "head_dim": 32, "num_attention_heads": 2},
    "tiny-windowed": {
        **_LLAMA, **_TINY, "architectures": ["MistralForCausalLM"], "head_dim": 64,
        "num_key_value_heads": 1, "sliding_window": 40,
    },
    "tiny-tied": {**_LLAMA, **_TINY, "num_hidden_layers": 4, "tie_word_embeddings": True},
    "tiny-moe": {
        **_QWEN3_MOE, **_TINY, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""By the names used here; the tiny ones are not published, to try a benchmark without a GPU."""


def raw_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """A checkpoint's config.json, with fewer layers if asked for."""
    raw = {
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "dtype": "bfloat16", "tie_word_embeddings": False, **SHAPES[shape],
    }  # fmt: skip
    raw["num_hidden_layers"] = min(raw["num_hidden_layers"], layers or raw["num_hidden_layers"])
    return raw


def config_of(shape: str, layers: int | None = None) -> ModelConfig:
    return parse_config(raw_config(shape, layers))


def weight_bytes(shape: str, layers: int | None = None) -> int:
    return plan_layout(config_of(shape, layers)).bytes


def attention_flops(config: ModelConfig, tokens: int) -> float:
    """Of a causal pass over `tokens` new tokens, both products, no cache before them."""
    return config.layers * 2 * 2 * config.heads * config.head_dim * tokens * (tokens + 1) / 2
