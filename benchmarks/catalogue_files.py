"""A catalogue of models of published shapes, with random weights, that fits a machine.

All models of one shape share one large file; each has a small one of its own (its last layer's last
matrices, and a last norm whose weights are a number of its own), so that no two give the same
numbers, nor nearly. The weights are made so that answers do not hang on
a rounding: the head's rows are the embedding's, moved on by `STRIDE` rows (none in tied models), so
the likeliest token follows from the last one by far, whatever the layers add, and the layers decide
how likely it is. What a wrong weight changes is therefore the log-probabilities, not the text.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from gpu_models import config_of, raw_config
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from c2cserve.engine.models.config import ModelConfig
from c2cserve.engine.models.layout import EMBED, HEAD, plan_layout
from c2cserve.memory.segment import segment_bytes

MIX = (("llama-3b", 10), ("llama-8b", 8), ("qwen3-14b", 4), ("qwen3-30b-a3b", 2))
"""Models of each shape in 24."""
STRIDE = 7
_RING = 16_777_259
"""Random numbers that all tensors are cut from; a prime, so that no two rows of one are alike."""
_COSINE = 20.0
"""Between the last hidden state and the embedding of the last token, times the root of their size:
enough that the likeliest token wins by far, and little enough that layers make up most of it."""
_OWN_SCALE, _ROUTER_SCALE = 3.0, 4.0
_GAINS = (0.5, 1.0)
"""Of last norms, the models of a shape evenly between. Log-probabilities of twelve models of 3B are
0.35 nats apart then (rms over six tokens; an answer may be 0.1 off). More would make all likeliest
tokens certain."""
_ATTENDED_RMS, _SILU_RMS = 0.25, 0.56
"""What is left of numbers of size 1 by a mean over a prompt, and by the activation."""
_LAST_NORM = "model.norm.weight"
_SHARED, _OWN = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    id: str
    shape: str
    layers: int


@dataclass(frozen=True, slots=True)
class Pick:
    """What a catalogue is made of."""

    entries: tuple[Entry, ...]
    scale: int
    bytes: int
    """Of all segments."""

    @property
    def shapes(self) -> dict[str, int]:
        """Shape -> layers."""
        return {entry.shape: entry.layers for entry in self.entries}


def pick(
    models: int, budget_bytes: int, scale: int | None = None,
    mix: Sequence[tuple[str, int]] = MIX,
) -> Pick:  # fmt: skip
    """`models` models in the mix's proportions, each shape at least once, with 1/`scale` of their
    layers; by default the smallest scale that fits. Raises ValueError if nothing does."""
    shapes = _interleaved(models, mix)
    most = max(config_of(shape).layers for shape, _ in mix)
    for tried in range(1, most + 1) if scale is None else [scale]:
        layers = {shape: max(1, round(config_of(shape).layers / tried)) for shape, _ in mix}
        sizes = {s: segment_bytes(plan_layout(config_of(s, n))) for s, n in layers.items()}
        total = sum(sizes[shape] for shape in shapes)
        if total <= budget_bytes:
            numbers = dict.fromkeys(layers, 0)
            entries: list[Entry] = []
            for shape in shapes:
                numbers[shape] += 1
                entries.append(Entry(f"{shape}.{numbers[shape]}", shape, layers[shape]))
            return Pick(tuple(entries), tried, total)
    raise ValueError(
        f"{models} models of {', '.join(s for s, _ in mix)} do not fit {budget_bytes / 1e9:.1f} GB"
        f" at scale {scale or most}: allow more memory, fewer models or a larger scale"
    )


def _interleaved(models: int, mix: Sequence[tuple[str, int]]) -> list[str]:
    """Shapes in turn, so that neighbours differ where they can."""
    if models < len(mix):
        raise ValueError(f"{models} models are too few for {len(mix)} shapes")
    whole = sum(weight for _, weight in mix)
    counts = {shape: max(1, round(models * weight / whole)) for shape, weight in mix}
    while (off := models - sum(counts.values())) != 0:
        shape = max(counts, key=lambda name: counts[name])
        counts[shape] += 1 if off > 0 else -1
    places = [((i + 0.5) / n, s) for s, n in counts.items() for i in range(n)]
    return [shape for _, shape in sorted(places)]


def write_catalogue(
    folder: Path, made: Pick, ttft_s: float = 1000.0, tpot_s: float = 1000.0
) -> Path:
    """Write checkpoints and the catalogue file, whose path it returns. `ttft_s` and `tpot_s` are
    the targets of all models. Raises OSError."""
    ring = torch.randn(_RING, generator=torch.Generator().manual_seed(1))
    for shape, layers in made.shapes.items():
        shared = folder / shape
        shared.mkdir(parents=True)
        (shared / "config.json").write_text(json.dumps(raw_config(shape, layers)))
        _write_tokenizer(shared / "tokenizer.json", config_of(shape).vocab)
        _write_weights(shared / _SHARED, config_of(shape, layers), ring, own=None)
    tables = [f"[defaults]\nttft_s = {ttft_s}\ntpot_s = {tpot_s}\n"]
    gains = {shape: _gains(made, shape) for shape in made.shapes}
    for entry in made.entries:
        directory = folder / "models" / entry.id
        directory.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", _SHARED):
            (directory / name).symlink_to(folder / entry.shape / name)
        config = config_of(entry.shape, entry.layers)
        gain = next(gains[entry.shape])
        _write_weights(directory / _OWN, config, ring, own=entry.id, gain=gain)
        tables.append(f'[[models]]\nid = "{entry.id}"\npath = "{directory}"\npinned = true\n')
    catalog = folder / "catalog.toml"
    catalog.write_text("\n".join(tables))
    return catalog


def _gains(made: Pick, shape: str) -> Iterator[float]:
    """One for each of a shape's models."""
    count, (low, high) = sum(entry.shape == shape for entry in made.entries), _GAINS
    return (low + (high - low) * (i + 0.5) / count for i in range(count))


def _write_tokenizer(path: Path, vocab: int) -> None:
    """Every token is its number: an answer's text is its tokens."""
    tokenizer = Tokenizer(WordLevel({f"\u0120{i}": i for i in range(vocab)}, "\u01200"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(path), pretty=False)


# ---- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    std: float
    """0: all are `fill`."""
    start: int
    """In the ring."""
    fill: float = 1.0


def _write_weights(
    path: Path, config: ModelConfig, ring: torch.Tensor, own: str | None, gain: float = 1.0
) -> None:
    """A safetensors file of the tensors all models of the shape share, or of one's own, whose last
    norm has `gain` for weights."""
    tensors = [
        tensor
        for tensor in _tensors(config, own or "", gain)
        if _is_own(tensor.name, config) == bool(own)
    ]
    header, end = {}, 0
    for one in tensors:
        size = 2 * math.prod(one.shape)
        header[one.name] = {
            "dtype": "BF16", "shape": one.shape, "data_offsets": [end, end + size],
        }  # fmt: skip
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        numbers: dict[tuple[float, float], memoryview] = {}
        for one in tensors:
            kind = one.std, one.fill
            if kind not in numbers:
                made = ring * one.std if one.std else torch.full((_RING,), one.fill)
                numbers[kind] = memoryview(made.bfloat16().view(torch.uint8).numpy())
            _write_ring(file, numbers[kind], one.start, math.prod(one.shape))


def _write_ring(file: BinaryIO, ring: memoryview, start: int, count: int) -> None:
    while count:
        run = min(count, _RING - start)
        file.write(ring[2 * start : 2 * (start + run)])
        start, count = 0, count - run


def _is_own(name: str, config: ModelConfig) -> bool:
    last = f"model.layers.{config.layers - 1}.mlp."
    return name == _LAST_NORM or (name.startswith(last) and "down_proj" in name)


def _tensors(config: ModelConfig, own: str, gain: float) -> Iterator[_Tensor]:
    head_norm, branch = head_norm_of(config), branch_of(config)
    embed_std = head_norm / math.sqrt(config.hidden)
    embed_start = zlib.crc32(b"embedding") % _RING
    for group in plan_layout(config).groups:
        for part in group.parts:
            start, fan_in = zlib.crc32(f"{own} {part.source}".encode()) % _RING, part.shape[-1]
            std = 1.0 / math.sqrt(fan_in)
            if len(part.shape) == 1:
                std = 0.0
            elif part.target == EMBED:
                std, start = embed_std, embed_start
            elif part.target == HEAD:
                std, start = embed_std, (embed_start - STRIDE * config.hidden) % _RING
            elif "o_proj" in part.source:
                std *= embed_std * branch / _ATTENDED_RMS
            elif "down_proj" in part.source:
                std *= embed_std * branch / _SILU_RMS * (_OWN_SCALE if own else 1.0)
            elif part.target.endswith("router"):
                std *= _ROUTER_SCALE
            fill = gain if part.source == _LAST_NORM else 1.0
            yield _Tensor(part.source, part.shape, std, start, fill)


def branch_of(config: ModelConfig) -> float:
    """What a layer's half adds to the hidden state, in embeddings: together they turn it by the
    angle that is wanted."""
    cosine = min(0.9, _COSINE / math.sqrt(config.hidden))
    halves = 2 * config.layers - 1 + _OWN_SCALE**2
    return math.sqrt((1 / cosine**2 - 1) / halves)


def head_norm_of(config: ModelConfig) -> float:
    """The norm of the head's rows that makes the likeliest token as likely as all others."""
    reach = min(0.9 * math.sqrt(config.hidden), _COSINE)
    return reach - math.sqrt(max(0.0, reach**2 - 2 * math.log(config.vocab)))
