"""A small catalogue with random weights for `simulator_fidelity.py`: steps of some 10 ms on a core,
so that what is compared is steps and policies, and not the client's own time."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 512
SIZES = {"small": (384, 6), "large": (640, 8)}
"""Name -> hidden size, layers."""
TTFT_S, TPOT_S = 0.3, 0.02


def make_catalog(folder: Path, copies: int) -> Path:
    """Checkpoints and their catalogue file."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    lines = [f"[defaults]\nttft_s = {TTFT_S}\ntpot_s = {TPOT_S}"]
    for size, (hidden, layers) in SIZES.items():
        for copy in range(copies):
            name = f"{size}-{copy}"
            _save(folder / name, hidden, layers, copy)
            tokenizer.save(str(folder / name / "tokenizer.json"))
            lines.append(f'[[models]]\nid = "{name}"\npath = "{name}"')
    path = folder / "catalog.toml"
    path.write_text("\n\n".join(lines) + "\n")
    return path


def _save(path: Path, hidden: int, layers: int, seed: int) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64,
        intermediate_size=3 * hidden, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)
