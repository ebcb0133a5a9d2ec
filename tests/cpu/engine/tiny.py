"""Small random checkpoints of every architecture, and a harness that runs ours on them."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.models.config import ModelConfig, parse_config, read_config
from c2cserve.engine.models.decoder import Decoder, ForwardBatch, run_to_end
from c2cserve.engine.models.layout import plan_layout
from c2cserve.engine.weights import Weights
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.ops import Ops
from c2cserve.memory.checkpoint import find_files, open_checkpoint, read_header
from c2cserve.memory.loader import Loader
from c2cserve.memory.segment import Segment

ToDevice = Callable[[ForwardBatch], ForwardBatch]
COMMON: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 100, "max_position_embeddings": 256,
    "head_dim": 24, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts_per_tok": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied-bias": (
        "Llama",
        {"num_key_value_heads": 6, "tie_word_embeddings": True, "attention_bias": True,
         "mlp_bias": True},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}},
    ),
    "llama-llama3": (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                             "rope_theta": 5e5}},
    ),
    "llama-yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 64}},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-longrope": (
        "Llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0,
                             "short_factor": [1.0 + i / 9 for i in range(12)],
                             "long_factor": [1.0 + i / 3 for i in range(12)],
                             "original_max_position_embeddings": 256}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    ),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"attention_bias": True, "num_key_value_heads": 6}),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 5}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**MOE, "num_experts": 6, "moe_intermediate_size": 44, "norm_topk_prob": True,
         "mlp_only_layers": [1]},
    ),
    "qwen3-moe-raw-weights": (
        "Qwen3Moe",
        {**MOE, "num_experts": 4, "moe_intermediate_size": 36, "norm_topk_prob": False,
         "decoder_sparse_step": 2},
    ),
}  # fmt: skip


def make_checkpoint(
    directory: Path, case: str, dtype: torch.dtype = torch.float32, **save: Any
) -> PreTrainedModel:
    """A random model of the case, saved."""
    name, overrides = CASES[case]
    seed = sum(map(ord, case))
    return make_model(directory, name, {**COMMON, **overrides}, seed, dtype, **save)


def make_model(
    directory: Path, name: str, fields: dict[str, Any], seed: int,
    dtype: torch.dtype = torch.float32, *, spread: float = 0.15, **save: Any,
) -> PreTrainedModel:  # fmt: skip
    """A random model, saved; its weights are large enough for attention to matter."""
    config = getattr(transformers, f"{name}Config")(**deepcopy(fields))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_experts_implementation("eager")  # the grouped one does not take all sizes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * spread + (parameter.ndim == 1) * 0.8)
    model = model.to(dtype)
    model.save_pretrained(directory, **save)
    return model


class Ours:
    """Our decoder on a checkpoint directory, with its own small arena."""

    def __init__(
        self, directory: Path, dtype: str = "auto", ops: Ops | None = None, blocks: int = 64, *,
        device: torch.device | None = None, to_device: ToDevice | None = None,
        weights: Callable[[Segment], Weights] = Weights, longest: int = 256,
    ) -> None:  # fmt: skip
        """`device` and `to_device`: as a decoder and an executor take them."""
        self.config: ModelConfig = parse_config(read_config(directory), dtype)
        names = frozenset(n for path in find_files(directory) for n in read_header(path))
        plan = plan_layout(self.config, names)
        sources = open_checkpoint(directory, plan)
        segment = Segment.create(directory / "segment", plan, sources)
        Loader(segment, plan, sources).run()
        self.segment = Segment.open(directory / "segment")
        self.decoder = Decoder(self.config, weights(self.segment), longest, device)
        self.ops = ops or CpuOps(2)
        self._to_device = to_device
        size = blocks * self.decoder.kv.block_bytes
        self.arena = make_arena(size).to(device or "cpu")
        self.table: dict[int, list[int]] = {}
        self._next = 0

    def step(
        self, parts: list[tuple[int, list[int], int]], shared: dict[int, int] | None = None
    ) -> list[torch.Tensor]:
        """Run (sequence, new tokens, start) parts in one batch; logits of every new token.
        `shared`: sequence -> another whose full blocks it begins with."""
        ids, positions, slots, starts, context = [], [], [], [0], []
        for seq, tokens, start in parts:
            blocks = self.table.setdefault(seq, [])
            if shared and seq in shared and not blocks:
                blocks += self.table[shared[seq]][: start // 16]
            while len(blocks) * 16 < start + len(tokens):
                blocks.append(self._next * self.decoder.kv.block_bytes)
                self._next += 1
            at = range(start, start + len(tokens))
            ids += tokens
            positions += at
            slots += [blocks[p // 16] * 16 + p % 16 for p in at]
            starts.append(len(ids))
            context.append(start + len(tokens))
        table = torch.zeros(
            (len(parts), max(len(self.table[s]) for s, _, _ in parts)), dtype=torch.int64
        )
        for i, (seq, _, _) in enumerate(parts):
            table[i, : len(self.table[seq])] = torch.tensor(self.table[seq])
        batch = ForwardBatch(
            ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            q_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor(context, dtype=torch.int32),
            block_table=table,
            slots=torch.tensor(slots),
            logit_rows=torch.arange(len(ids)),
            longest=max(context),
        )
        if self._to_device is not None:
            batch = self._to_device(batch)
        logits = run_to_end(self.decoder.forward(batch, self.ops, self.arena))
        return list(logits.split([len(tokens) for _, tokens, _ in parts]))
