"""The models that are served: checkpoints on disk, the catalogue file, and what the judge knows.

Two families. *Numbers*: shapes of published models with random weights (`catalogue_files`); a
token is its number, so a text is its tokens and any answer can be scored again. *Specialists*: the
trained models of the demo; which token comes next hangs on the whole context, so a wrong byte of KV
shows in their text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalogue_files import Entry, Pick, write_catalogue
from gpu_models import config_of

from c2cserve.engine.models.config import parse_config, read_config
from c2cserve.engine.models.layout import plan_layout
from c2cserve.memory.segment import segment_bytes

SPECIALISTS = Path(__file__).parents[2] / "examples" / "specialists"
_NO_TARGETS = "[defaults]\nttft_s = 1000.0\ntpot_s = 1000.0\n"
"""Nothing is refused for being late, unless a request brings a target of its own."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`copies` models of a shape of `gpu_models.SHAPES`, with their first layers."""

    name: str
    layers: int
    copies: int
    context: int


CPU_SHAPES = (
    Shape("tiny-llama", 2, 2, 2048),
    Shape("tiny-qwen3", 2, 2, 1024),
    Shape("tiny-moe", 2, 2, 1024),
    Shape("tiny-tied", 4, 1, 1024),
    Shape("tiny-windowed", 2, 1, 1024),
)
GPU_SHAPES = (
    Shape("llama-1b", 4, 2, 8192),
    Shape("llama-3b", 4, 2, 8192),
    Shape("llama-8b", 4, 2, 8192),
    Shape("qwen3-0.6b", 8, 2, 4096),
    Shape("qwen3-30b-a3b", 2, 2, 8192),
    Shape("mistral-7b", 2, 1, 8192),
)


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    path: Path
    vocab: int
    context: int
    """Tokens of prompt and output together."""
    kv_token_bytes: int
    weight_bytes: int
    numbers: bool
    """Every token is its number in the text, and no token ends an answer."""
    chats: bool = False
    twin: str = ""
    """A model of the catalogue with the same files, of one that was added while serving."""

    @property
    def same_as(self) -> str:
        return self.twin or self.id


@dataclass(frozen=True, slots=True)
class Catalogue:
    file: Path
    models: tuple[Model, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(model.weight_bytes for model in self.models)

    @property
    def largest(self) -> Model:
        return max(self.models, key=lambda model: model.weight_bytes)

    @property
    def longest_kv_bytes(self) -> int:
        """KV of the one request that takes most: the least an arena must hold."""
        return max(model.kv_token_bytes * model.context for model in self.models)


def needed_bytes(shapes: Sequence[Shape]) -> int:
    """Of checkpoints and pool, at most: the files of a shape's models are shared but for a part."""
    sizes = {s.name: segment_bytes(plan_layout(config_of(s.name, s.layers))) for s in shapes}
    return sum(int(sizes[s.name] * (1 + 1.2 * s.copies)) for s in shapes)


def make_catalogue(folder: Path, shapes: Sequence[Shape]) -> Catalogue:
    """Write checkpoints and catalogue. Raises OSError."""
    entries = [
        Entry(f"{s.name}.{i + 1}", s.name, s.layers) for s in shapes for i in range(s.copies)
    ]
    sizes = {s.name: segment_bytes(plan_layout(config_of(s.name, s.layers))) for s in shapes}
    made = Pick(tuple(entries), 1, sum(sizes[entry.shape] for entry in entries))
    write_catalogue(folder, made)
    contexts = {shape.name: shape.context for shape in shapes}
    models = [_numbers(folder, entry, contexts[entry.shape]) for entry in entries]
    models += [
        _specialist(path)
        for path in sorted(SPECIALISTS.iterdir())
        if (path / "config.json").exists()
    ]
    tables = [
        f"[[models]]\nid = {json.dumps(one.id)}\npath = {json.dumps(str(one.path))}\n"
        f"max_context = {one.context}\n"
        for one in models
    ]
    file = folder / "soak.toml"
    file.write_text("\n".join([_NO_TARGETS, *tables]))
    return Catalogue(file, tuple(models))


def _numbers(folder: Path, entry: Entry, context: int) -> Model:
    config = config_of(entry.shape, entry.layers)
    return Model(
        entry.id, folder / "models" / entry.id, config.vocab, context,
        -(-config.kv_block_bytes // 16), segment_bytes(plan_layout(config)), numbers=True,
    )  # fmt: skip


def _specialist(path: Path) -> Model:
    config = parse_config(read_config(path))
    return Model(
        path.name, path, config.vocab, config.max_position, -(-config.kv_block_bytes // 16),
        segment_bytes(plan_layout(config)), numbers=False, chats=path.name.startswith("chatter"),
    )  # fmt: skip
