"""The messages between the server and its text processes: frames of MessagePack."""

from typing import Literal

import msgspec

from c2cserve.core.request import Sampling, SamplingDefaults
from c2cserve.runtime.gateway import ModelFiles
from c2cserve.server.settings import RequestLimits
from c2cserve.server.text.vocabulary import VocabularyFacts
from c2cserve.server.tools.reading import ReadingPlan

FRAME_HEAD_BYTES = 4
"""Bytes of the head of a frame: the length of the message behind it, little-endian."""

Api = Literal[
    "completions", "chat", "tokenize", "detokenize", "messages", "count_tokens", "ollama_chat",
    "ollama_generate", "ollama_show", "responses",
]  # fmt: skip


class OpenModel(msgspec.Struct, tag=True):
    """Load the tokenizer of a model's version. Answered by `ModelOpened`."""

    version: str
    path: str
    known: list[str]
    """Digests of tokenizers' files. The answer contains the vocabulary of any other file."""
    drop: list[str]
    """Versions whose tokenizers are dropped before loading this one."""


class Target(msgspec.Struct, frozen=True):
    """The facts about a model's version that preparing a request's text needs."""

    version: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    tables: str
    """The beginning of the paths of files with vocabularies (`grammars.table`)."""

    @classmethod
    def of(cls, files: ModelFiles) -> "Target":
        return cls(
            files.key, files.max_context, files.vocab_size, files.eos_token_ids, files.defaults,
            files.tables,
        )  # fmt: skip


class TextRequest(msgspec.Struct, tag=True):
    """Validate a request's body, render and tokenize it. Answered by `TextResult`, or for
    /tokenize and /detokenize by `TextAnswer`."""

    api: Api
    body: bytes
    target: Target | None
    """A version whose tokenizer is loaded; None: validate only."""
    limits: RequestLimits
    cache_salt: bytes = b""
    """The salt of the request's cache group (server/access/cache_salts.py)."""


class ModelOpened(msgspec.Struct, tag=True):
    digest: str
    """The digest of the tokenizer's file."""
    facts: VocabularyFacts | None


class Asked(msgspec.Struct):
    """A checked request without its prompts."""

    model: str
    """The model's name in the request."""
    chat: bool
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Usage in every chunk of a stream."""
    service_tier: bool
    """The answer says which tier served it."""
    echo: bool
    no_output: bool
    """Only the prompt is answered with. A job samples at least one token, which is not shown."""
    stops: tuple[str, ...]
    priority: int | None
    sampling: Sampling
    reading: ReadingPlan | None
    """What to look for in the outputs of a chat, None for nothing."""
    repeated: bytes = b""
    """What answers repeat of the request, as a JSON object; empty for most APIs."""


class TokenizedPrompt(msgspec.Struct):
    tokens: bytes
    """Token ids, 32 bits each."""
    hashes: bytes
    """Prefix hashes, 64 bits each, one per full block."""
    text: str
    """The prompt's text for `echo`; empty for chats."""
    max_new_tokens: int


class TextResult(msgspec.Struct, tag=True):
    asked: Asked
    prompts: list[TokenizedPrompt]


class TextAnswer(msgspec.Struct, tag=True):
    """The answer to a request that needs no slice."""

    model: str
    """The model's name in the request."""
    content: bytes
    """JSON; empty if the request had no target."""


class TextFailure(msgspec.Struct, tag=True):
    """`OpenModel` or `TextRequest` failed; the fields are those of the client's error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    broken: bool = False
    """The process must be replaced, because a library in it broke."""


ToText = OpenModel | TextRequest
FromText = ModelOpened | TextResult | TextAnswer | TextFailure

_encoder = msgspec.msgpack.Encoder()
decode_to_text = msgspec.msgpack.Decoder(ToText).decode
decode_from_text = msgspec.msgpack.Decoder(FromText).decode


def frame(message: ToText | FromText) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(FRAME_HEAD_BYTES, "little") + data
