"""config.json of models as published (fields that matter), in the old style and the newer one."""

from typing import Any

LLAMA31_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


def _config(
    arch: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [f"{arch}ForCausalLM"], "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv, "vocab_size": vocab, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip


QWEN_WINDOW = {"use_sliding_window": False, "rms_norm_eps": 1e-6, "eos_token_id": 151645}

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": _config(
        "Llama", 32, 4096, 32, 32, 11008, 32000, max_position_embeddings=4096,
        torch_dtype="float16", eos_token_id=2, rope_scaling=None, pretraining_tp=1,
    ),
    "llama-3.1-8b": _config(
        "Llama", 32, 4096, 32, 8, 14336, 128256, max_position_embeddings=131072,
        eos_token_id=[128001, 128008, 128009], rope_theta=500000.0, rope_scaling=LLAMA31_ROPE,
        attention_bias=False, mlp_bias=False,
    ),
    "llama-3.2-1b": _config(
        "Llama", 16, 2048, 32, 8, 8192, 128256, max_position_embeddings=131072, head_dim=64,
        eos_token_id=[128001, 128008, 128009], rope_theta=500000.0, tie_word_embeddings=True,
        rope_scaling={**LLAMA31_ROPE, "factor": 32.0},
    ),
    "mistral-7b-v0.1": _config(
        "Mistral", 32, 4096, 32, 8, 14336, 32000, max_position_embeddings=32768,
        sliding_window=4096, rope_theta=10000.0, eos_token_id=2,
    ),
    "mistral-7b-v0.3": _config(
        "Mistral", 32, 4096, 32, 8, 14336, 32768, max_position_embeddings=32768,
        sliding_window=None, rope_theta=1000000.0, eos_token_id=2,
    ),
    "qwen2.5-0.5b": _config(
        "Qwen2", 24, 896, 14, 2, 4864, 151936, max_position_embeddings=32768, max_window_layers=21,
        rope_theta=1000000.0, sliding_window=32768, **QWEN_WINDOW | {"tie_word_embeddings": True},
    ),
    "qwen2.5-7b-yarn": _config(
        "Qwen2", 28, 3584, 28, 4, 18944, 152064, max_position_embeddings=32768,
        max_window_layers=28, rope_theta=1000000.0, sliding_window=131072, **QWEN_WINDOW,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    ),
    "qwen3-8b": _config(
        "Qwen3", 36, 4096, 32, 8, 12288, 151936, max_position_embeddings=40960, head_dim=128,
        max_window_layers=36, rope_theta=1000000, rope_scaling=None, sliding_window=None,
        attention_bias=False, **QWEN_WINDOW,
    ),
    "mixtral-8x7b": _config(
        "Mixtral", 32, 4096, 32, 8, 14336, 32000, max_position_embeddings=32768, eos_token_id=2,
        num_experts_per_tok=2, num_local_experts=8, rope_theta=1000000.0, sliding_window=None,
    ),
    "qwen3-30b-a3b": _config(
        "Qwen3Moe", 48, 2048, 32, 4, 6144, 151936, max_position_embeddings=40960, head_dim=128,
        max_window_layers=48, rope_theta=1000000.0, rope_scaling=None, sliding_window=None,
        attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768,
        norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, **QWEN_WINDOW,
    ),
}  # fmt: skip
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b-yarn": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}
