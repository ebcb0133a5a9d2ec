"""The engine on a real GPU: small models whose sizes all kernels take, and where their weights are.

The harnesses are those of tests/cpu/engine: one engine, whatever computes.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts
from c2cserve.engine.weights import Weights
from c2cserve.kernels.gpu import driver
from c2cserve.kernels.ops import SampledTokens
from c2cserve.memory.segment import Segment

sys.path.insert(0, str(Path(__file__).parent.parent / "cpu" / "engine"))
from engine_reports import EngineReports
from lane import Lane, LateModel
from tiny import Ours, make_model
from transformers import AutoModelForCausalLM

__all__ = [
    "CASES",
    "EngineReports",
    "Lane",
    "LateModel",
    "make",
    "on_gpu",
    "ours_at",
    "shared_folder",
    "truth",
]

VOCAB = 1000
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1024, "max_position_embeddings": 1024,
    "head_dim": 64, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 128}),
    "llama-long": ("Llama", {"head_dim": 128, "max_position_embeddings": 16384}),
    "llama-bias-80": ("Llama", {"head_dim": 80, "attention_bias": True, "mlp_bias": True}),
    "llama-1000": ("Llama", {"intermediate_size": 1000, "mlp_bias": True}),
    "llama-256": ("Llama", {"head_dim": 256, "num_attention_heads": 4}),
    "mistral-window": ("Mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2", {"num_attention_heads": 14}),
    "qwen3-tied": ("Qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
         "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
}  # fmt: skip


@contextmanager
def shared_folder() -> Iterator[Path]:
    """In shared memory, where the pool's segments are: only such memory is registered."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="c2cserve-test-") as folder:
        yield Path(folder)


def make(folder: Path, case: str) -> Path:
    """A checkpoint, where it was made."""
    name, overrides = CASES[case]
    seed = sum(map(ord, case))
    make_model(folder, name, {**COMMON, **overrides}, seed, torch.bfloat16, spread=0.05)
    return folder


@torch.inference_mode()
def truth(folder: Path, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """transformers' logits [T, V] on the GPU in bfloat16, and in float32, which is the truth. Both
    as loaded: a model that is converted keeps rotary frequencies that were rounded to bfloat16."""
    ids = torch.tensor([tokens], device="cuda")

    def logits(dtype: torch.dtype) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().cuda()
        return model(ids).logits[0].float().cpu()

    return logits(torch.bfloat16), logits(torch.float32)


class _MovedWeights(Weights):
    """Matrices in a GPU's memory instead of the host's."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        super().__init__(segment)
        self._device = device

    def tensor(self, name: str) -> Tensor:
        moved = super().tensor(name).to(self._device)
        torch.cuda.synchronize(
            self._device
        )  # it came on a stream that the slice's knows nothing of
        return moved


def ours_at(
    folder: Path, home: str, gpu: GpuParts, segments: PinnedSegments, *, blocks: int = 256,
    longest: int = 1024,
) -> Ours:  # fmt: skip
    """Our decoder with weights at a home; at `host` they are those of a registered segment, to be
    given back to `segments` as `folder / "segment"`."""
    match home:
        case "host":

            def weights(segment: Segment) -> Weights:
                return Weights(segments.open(segment.path))
        case "peer":
            driver.enable_peer(0, 1)

            def weights(segment: Segment) -> Weights:
                return _MovedWeights(segment, torch.device("cuda", 1))
        case _:

            def weights(segment: Segment) -> Weights:
                return _MovedWeights(segment, gpu.device)

    return Ours(
        folder, ops=gpu.ops, blocks=blocks, device=gpu.device, to_device=gpu.to_device,
        weights=weights, longest=longest,
    )  # fmt: skip


def on_gpu(gpu: GpuParts) -> Lane:
    """An executor of the slice."""
    return Lane(gpu.ops, arena=gpu.arena, to_device=gpu.to_device)


def no_sampler(logits: Tensor, rows: object) -> SampledTokens:
    raise AssertionError("greedy rows are the GPU's")
