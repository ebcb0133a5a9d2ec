"""config.json in, the one normalised form out, or one line that says what is wrong."""

import dataclasses
import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers
from published import LLAMA31_ROPE, PUBLISHED

from c2cserve.engine.models.config import ConfigError, Moe, Rope, parse_config, read_config

LLAMA = PUBLISHED["llama-3.1-8b"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_old_style_and_what_transformers_5_makes_of_it_are_the_same(name: str) -> None:
    raw = PUBLISHED[name]
    arch = raw["architectures"][0].removesuffix("ForCausalLM")
    newer = json.loads(
        getattr(transformers, f"{arch}Config")(**deepcopy(raw)).to_json_string(False)
    )
    assert "rope_parameters" in newer
    assert "torch_dtype" not in newer
    old, new = parse_config(raw), parse_config({**newer, "architectures": raw["architectures"]})
    assert dataclasses.replace(new, rope=old.rope) == old
    assert (new.rope.theta, new.rope.type) == (old.rope.theta, old.rope.type)
    assert dict(old.rope.scaling).items() <= dict(new.rope.scaling).items()


def test_llama() -> None:
    config = parse_config(LLAMA)
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (32, 4096, 32, 8)
    assert (config.head_dim, config.intermediate, config.vocab) == (128, 14336, 128256)
    scaling = {k: v for k, v in LLAMA31_ROPE.items() if k != "rope_type"}
    assert config.rope == Rope(500000.0, "llama3", scaling)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.dtype == "bfloat16"
    assert config.windows == (0,) * 32
    assert config.moe is None
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert config.kv_block_bytes == 32 * 2 * 8 * 16 * 128 * 2


def test_what_sets_the_others_apart() -> None:
    assert parse_config(PUBLISHED["mistral-7b-v0.1"]).windows == (4096,) * 32
    assert parse_config(PUBLISHED["mistral-7b-v0.3"]).windows == (0,) * 32
    qwen2 = parse_config(PUBLISHED["qwen2.5-0.5b"])
    assert qwen2.qkv_bias
    assert not qwen2.o_bias
    assert qwen2.tied
    assert set(qwen2.windows) == {0}
    assert parse_config(PUBLISHED["qwen3-8b"]).qk_norm
    assert parse_config(PUBLISHED["qwen2.5-7b-yarn"]).rope.type == "yarn"
    assert parse_config(PUBLISHED["mixtral-8x7b"]).moe == Moe(8, 2, 14336, True, (True,) * 32)
    assert parse_config(PUBLISHED["qwen3-30b-a3b"]).moe == Moe(128, 8, 768, True, (True,) * 48)


def test_qwen_windows_only_if_told_and_only_the_upper_layers() -> None:
    raw = {**PUBLISHED["qwen2.5-0.5b"], "sliding_window": 512, "max_window_layers": 21}
    assert set(parse_config(raw).windows) == {0}
    assert parse_config({**raw, "use_sliding_window": True}).windows == (0,) * 21 + (512,) * 3


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [(1, [], "1111"), (2, [], "0101"), (1, [0, 3], "0110"), (2, [1], "0001"), (3, None, "0010")],
)
def test_which_layers_of_qwen3_moe_are_sparse(step: int, dense: object, sparse: str) -> None:
    raw = PUBLISHED["qwen3-30b-a3b"]
    raw = {**raw, "num_hidden_layers": 4, "decoder_sparse_step": step, "mlp_only_layers": dense}
    config = parse_config(raw)
    assert "".join(str(int(config.sparse(layer))) for layer in range(4)) == sparse


def test_dtype_can_be_chosen() -> None:
    assert parse_config(LLAMA, "float32").dtype == "float32"
    assert parse_config({**LLAMA, "torch_dtype": "torch.float16"}).dtype == "float16"
    assert parse_config({k: v for k, v in LLAMA.items() if k != "torch_dtype"}).dtype == "float32"
    with pytest.raises(ConfigError, match="choose float32, float16 or bfloat16"):
        parse_config(LLAMA, "float8")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are"),
        ({"architectures": None}, "unknown is not supported; supported are LlamaForCausalLM"),
        ({"architectures": ["BertModel"]}, "BertModel is not supported.*not generate text"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
            "Gemma3ForConditionalGeneration is not supported.*multimodal",
        ),
        ({"architectures": ["T5Model"], "is_encoder_decoder": True}, "T5Model .*only decoders"),
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"]},
            "is not supported.*It reads more than text",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights .awq.*made from"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; supported is silu"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "rope type 'su' is not supported; sup"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 5}, "32 heads"),
        ({"head_dim": 33}, "33"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({**LLAMA, **change})


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"])
def test_missing_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json lacks '{name}'"):
        parse_config({key: value for key, value in LLAMA.items() if key != name})


def test_generation_config_may_extend_the_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 128001}))
    assert parse_config(read_config(tmp_path)).eos_token_ids == (128001,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128001, 128009]}')
    assert parse_config(read_config(tmp_path)).eos_token_ids == (128001, 128009)


def test_unreadable_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is this a checkpoint directory"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        read_config(tmp_path)


def test_configs_and_layouts_need_no_torch() -> None:
    probe = (
        "import sys, c2cserve.engine.models.layout, c2cserve.engine.models.config;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)
