"""One model in two forms: the same weights, and the same tokens of a prompt."""

import random
from pathlib import Path

import pytest
import torch
from cpu_peer_model import vocabulary, write_peer
from cpu_peers import text
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file
from tokenizers import Tokenizer


def test_both_forms_have_the_same_weights(tmp_path: Path) -> None:
    name, gguf = write_peer(tmp_path, "tiny-qwen2")
    ours: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "models" / name).glob("*.safetensors"):
        ours |= load_file(str(file))
    theirs = {one.name: one for one in GGUFReader(gguf).tensors}
    assert len(theirs) == len(ours)
    for of, at in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.self_attn.q_proj.bias", "blk.1.attn_q.bias"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ):
        found = theirs[at]
        assert list(found.shape) == list(reversed(ours[of].shape)), "the fastest dimension first"
        if found.tensor_type == GGMLQuantizationType.BF16:
            read = torch.from_numpy(found.data.copy()).view(torch.bfloat16)
        else:
            read = torch.from_numpy(found.data.copy())
        assert torch.equal(read.reshape(ours[of].shape).float(), ours[of].float())


def test_a_word_is_a_token(tmp_path: Path) -> None:
    name, gguf = write_peer(tmp_path, "tiny-qwen2")
    tokenizer = Tokenizer.from_file(str(tmp_path / "models" / name / "tokenizer.json"))
    prompt = " " + text(100, random.Random(1))
    assert len(tokenizer.encode(prompt).ids) == 100
    assert tokenizer.decode(tokenizer.encode(prompt).ids) == prompt
    field = GGUFReader(gguf).get_field("tokenizer.ggml.tokens")
    assert field is not None
    assert field.contents() == vocabulary(512)[0]


def test_a_vocabulary_holds_all_words() -> None:
    with pytest.raises(ValueError, match="too small"):
        vocabulary(100)
