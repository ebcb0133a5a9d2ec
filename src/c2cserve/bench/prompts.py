"""Prompts of a wanted length for a model whose tokenizer is not known.

Token ids are exact where the server takes them. Text is counted in words, scaled by the tokens that
the server reports for one word. Every prompt starts elsewhere in one random stream. So no two of a
run share a prefix, and a prefix cache does not flatter the result.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec

from c2cserve.bench.loadgen import Planned
from c2cserve.bench.loadgen_http import Client
from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.terminal.output import CliError

T = TypeVar("T")

# Frequent short words, each one token of most vocabularies.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are",
    "with", "as", "his", "they", "at", "be", "this", "from", "have", "or", "by", "one", "had",
    "not", "but", "what", "all", "were", "when", "we", "there", "can", "an", "your", "which",
    "their", "said", "if", "do", "will", "each", "how", "about", "up", "out", "them", "then",
    "she", "many", "some", "so", "these", "would", "other", "into", "has", "more", "her", "two",
    "like", "him", "see", "time", "could", "no", "make", "than", "first", "been", "its", "who",
)  # fmt: skip
_STREAM = 1 << 16
_ID_LOW, _ID_HIGH = 5, 64
"""Ids every vocabulary has; the lowest are often special tokens."""
_PROBE_TOKENS = 24


class PromptKind(StrEnum):
    AUTO = "auto"
    IDS = "ids"
    TEXT = "text"


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Endpoint.COMPLETIONS else "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Style:
    """The form of a model's prompts: ids, or text at some tokens per word plus a constant."""

    ids: bool
    tokens_per_word: float = 1.0
    constant_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Options:
    endpoint: Endpoint = Endpoint.COMPLETIONS
    ignore_eos: bool = False
    temperature: float = 0.0


class Prompts:
    """Builds request bodies. Deterministic by seed."""

    def __init__(self, seed: int, options: Options) -> None:
        rng = random.Random(seed)
        self._rng = rng
        self._options = options
        self._ids = [rng.randrange(_ID_LOW, _ID_HIGH) for _ in range(_STREAM)]
        self._words: list[str] = rng.choices(_WORDS, k=_STREAM)

    def body(self, shape: Shape, style: Style) -> bytes:
        prompt: str | list[int]
        if style.ids:
            prompt = _cut(self._ids, self._rng.randrange(_STREAM), shape.input_tokens)
        else:
            words = (shape.input_tokens - style.constant_tokens) / style.tokens_per_word
            count = max(1, round(words))
            prompt = " ".join(_cut(self._words, self._rng.randrange(_STREAM), count))
        fields: dict[str, object] = {
            "model": shape.model,
            "max_tokens": shape.output_tokens,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.endpoint is Endpoint.CHAT:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self._options.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)

    def plan(self, shapes: Sequence[Shape], styles: Mapping[str, Style]) -> list[Planned]:
        return [
            Planned(index, shape.model, self.body(shape, styles[shape.model]), shape.due_s)
            for index, shape in enumerate(shapes)
        ]


def _cut(stream: list[T], start: int, count: int) -> list[T]:
    repeats = (start + count) // len(stream) + 1
    return (stream * repeats)[start : start + count]


async def find_style(
    client: Client, model: str, kind: PromptKind, prompts: Prompts, endpoint: Endpoint
) -> Style:
    """Ask the model once or twice which style fits. Raises `CliError` when it does not answer."""
    if kind is PromptKind.TEXT:
        return Style(ids=False)
    if endpoint is Endpoint.COMPLETIONS:
        by_ids = Style(ids=True)
        record = await _probe(client, model, prompts, by_ids, endpoint, _PROBE_TOKENS)
        exact = record.ok and record.prompt_tokens - _PROBE_TOKENS in (0, 1)
        if exact or kind is PromptKind.IDS:
            if not record.ok:
                raise CliError(f"{model}: {record.error}: {record.error_detail}")
            return by_ids
    few, many = _PROBE_TOKENS, 3 * _PROBE_TOKENS
    plain = Style(ids=False)
    short = await _probe(client, model, prompts, plain, endpoint, few)
    longer = await _probe(client, model, prompts, plain, endpoint, many)
    for record in (short, longer):
        if not record.ok:
            raise CliError(f"{model}: {record.error}: {record.error_detail}")
    if not 0 < short.prompt_tokens < longer.prompt_tokens:
        return plain
    slope = (longer.prompt_tokens - short.prompt_tokens) / (many - few)
    return Style(
        ids=False, tokens_per_word=slope, constant_tokens=short.prompt_tokens - slope * few
    )


async def _probe(
    client: Client, model: str, prompts: Prompts, style: Style, endpoint: Endpoint, tokens: int
) -> Record:
    record = Record(index=-1, model=model, due_s=0.0)
    await client.post(endpoint.path, prompts.body(Shape(model, tokens, 1), style), record)
    return record
