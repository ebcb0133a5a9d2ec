"""One model with random weights for `cpu_peers.py`, twice: in a catalogue, and as llama.cpp's GGUF.

    python benchmarks/cpu_peer_model.py FOLDER [--shape qwen2.5-0.5b]

FOLDER gets `catalog.toml` with its one model, and `model.gguf` with the same weights in the same
dtype. Both have a vocabulary in which each word that `cpu_peers.py` writes is one token, with the
space before it, so prompts of both servers have the same length.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from catalogue_files import pick, write_catalogue
from cpu_peers import WORDS
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gpu_models import SHAPES, raw_config
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

QWEN2 = tuple(name for name, raw in SHAPES.items() if raw["architectures"] == ["Qwen2ForCausalLM"])
"""The family whose rows llama.cpp reads as they are in a checkpoint."""
_SPACE = "\u0120"
_OUTSIDE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
_INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""A checkpoint's names, and llama.cpp's."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=QWEN2)
    given = parser.parse_args(arguments)
    name, gguf = write_peer(given.folder, given.shape)
    print(f"{name}: {given.folder / 'catalog.toml'}, {gguf}", file=sys.stderr)


def write_peer(folder: Path, shape: str) -> tuple[str, Path]:
    """Write both forms of a model. Return its name in the catalogue, and the GGUF's path."""
    made = pick(1, 1 << 60, 1, ((shape, 1),))
    write_catalogue(folder, made)
    name = made.entries[0].id
    model, gguf = folder / "models" / name, folder / "model.gguf"
    tokens, merges = vocabulary(raw_config(shape)["vocab_size"])
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    (model / "tokenizer.json").unlink(missing_ok=True)  # it may be a link, shared with others
    tokenizer.save(str(model / "tokenizer.json"))
    _write_gguf(gguf, shape, model, tokens, merges)
    return name, gguf


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return `size` tokens and the merges of BPE that make them: all bytes, and all words, each
    with the space before it."""
    tokens: list[str] = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    seen = set(tokens)
    for word in sorted(set(WORDS), key=lambda word: (len(word), word)):
        start = _SPACE
        for letter in word:
            if start + letter not in seen:
                merges.append((start, letter))
                seen.add(start + letter)
                tokens.append(start + letter)
            start += letter
    if size < len(tokens):
        raise ValueError(f"a vocabulary of {size} tokens is too small: it takes {len(tokens)}")
    return [*tokens, *(f"pad{i}" for i in range(len(tokens), size))], merges


def _write_gguf(
    path: Path, shape: str, model: Path, tokens: list[str], merges: list[tuple[str, str]]
) -> None:
    raw = raw_config(shape)
    writer = GGUFWriter(path, "qwen2")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([f"{first} {second}" for first, second in merges])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    for name, data, dtype in _tensors(model):
        writer.add_tensor(name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Path) -> Iterator[tuple[str, NDArray[np.generic], GGMLQuantizationType]]:
    """Yield llama.cpp's tensors of a checkpoint: matrices in bf16, vectors in float32, as its own
    converter writes them."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensor: torch.Tensor = opened.get_tensor(name)
                if tensor.dim() == 1:
                    yield _renamed(name), tensor.float().numpy(), GGMLQuantizationType.F32
                else:
                    raw = tensor.contiguous().view(torch.uint8).numpy()
                    yield _renamed(name), raw, GGMLQuantizationType.BF16


def _renamed(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{end}"
    _, _, layer, inside = stem.split(".", 3)
    return f"blk.{layer}.{_INSIDE[inside]}.{end}"


if __name__ == "__main__":
    main()
