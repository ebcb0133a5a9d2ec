"""Settings of the HTTP server, and limits of requests."""

from dataclasses import dataclass, field

import msgspec


class RequestLimits(msgspec.Struct, frozen=True):
    """The limits of one request. Every field is an option of `serve`: `--max-` and its name."""

    choices: int = 256
    """Prompts x `n`."""
    messages: int = 4096
    stops: int = 16
    logit_bias: int = 1024
    """Entries of `logit_bias`, and of `stop_token_ids`."""
    prompt_chars: int = 4 << 20
    """Characters of all prompts or messages together, and of a chat template's output."""
    prompt_tokens: int = 1 << 20
    """Summed over choices: each of a prompt's choices counts its tokens again."""
    grammar_chars: int = 1 << 16
    """Characters of what an output is held to: schemas as JSON, a regular expression, ..."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    connections: int = 4096
    """Open connections. A further one closes an idle one, or is refused if none is idle."""
    header_bytes: int = 64 << 10
    headers: int = 128
    head_timeout_s: float = 10.0
    """Time from a request's first byte to the end of its headers."""
    body_timeout_s: float = 60.0
    """Time from there to the end of its body."""
    idle_timeout_s: float = 60.0
    """Time without a request."""
    send_timeout_s: float = 60.0
    """Time in which a client reads nothing of its answer."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Settings of the processes that validate, render and tokenize."""

    processes: int = 2
    timeout_s: float = 10.0
    """Time for one request; then its process is killed."""
    load_timeout_s: float = 60.0
    """Time to load a model's tokenizer."""
    waiting: int = 1024
    """Requests that may wait for a process; further ones get 429."""
    memory_bytes: int = 4 << 30
    """Limit of the data segment of one process."""
    tokenizers: int = 16
    """Tokenizers that one process keeps; the least recently used ones make way. Models with equal
    files have one together."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Checks of requests beside their keys (server/guard.py), and sharing of prefix caches."""

    loopback_only: bool = True
    """The server listens on a loopback address only, so `Host` is checked."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted names in `Host` beside this machine's own, in lower case; `*`: any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may use /v1 and /api, in lower case; `*`: any."""
    open_metrics: bool = False
    """/metrics needs neither a key nor a local peer."""
    shared_cache: bool = False
    """All keys given as options reuse each other's prefixes."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    # Keys are never shown: settings may be printed in an error.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """If there are any, /v1 and /api require one of them."""
    admin_key: str = field(default="", repr=False)
    """If set, /admin and /metrics require it. If not, they answer local peers only."""
    body_bytes_max: int = 8 << 20
    bodies_bytes_max: int = 256 << 20
    """Bytes of all bodies that are being received or tokenized."""
    vocabularies: int = 64
    """Vocabularies in memory; the least recently used ones make way."""
    requests: RequestLimits = field(default_factory=RequestLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    text: TextSettings = field(default_factory=TextSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
