"""How the HTTP server behaves, and what a client may ask of it."""

from dataclasses import dataclass, field

import msgspec


class RequestLimits(msgspec.Struct, frozen=True):
    """What one request may ask for. Every field is an option of `serve`, `--max-` and its name."""

    choices: int = 256
    """Prompts x `n`."""
    messages: int = 4096
    stops: int = 16
    logit_bias: int = 1024
    """Entries of `logit_bias`, and of `stop_token_ids`."""
    prompt_chars: int = 4 << 20
    """Of all prompts or messages together, and of what a chat template makes of them."""
    prompt_tokens: int = 1 << 20
    """Summed over choices: each of a prompt's choices counts its tokens again."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    connections: int = 4096
    """Open at once; beyond that one that waits for a request is closed, or the new one refused."""
    header_bytes: int = 64 << 10
    headers: int = 128
    head_timeout_s: float = 10.0
    """From a request's first byte to the end of its headers."""
    body_timeout_s: float = 60.0
    """From there to the end of its body."""
    idle_timeout_s: float = 60.0
    """Without a request."""
    send_timeout_s: float = 60.0
    """In which a client takes nothing of its answer."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """The processes that validate, render and tokenize."""

    processes: int = 2
    timeout_s: float = 10.0
    """For one request; then its process is killed."""
    load_timeout_s: float = 60.0
    """For reading a model's tokenizer."""
    waiting: int = 256
    """Requests that wait for a process before 429."""
    memory_bytes: int = 4 << 30
    """Data of one process."""
    tokenizers: int = 16
    """Kept by one process; the least recently used ones make way."""


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may ask, keys aside (server/guard.py), and who shares a prefix cache."""

    loopback_only: bool = True
    """The server listens on a loopback address: its hosts are checked."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` beside this machine's own, in lower case; `*`: any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may use /v1, in lower case; `*`: any."""
    open_metrics: bool = False
    """/metrics needs neither a key nor a local peer."""
    shared_cache: bool = False
    """All simple keys reuse each other's prefixes."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    # Keys are never shown: settings may be printed where something fails.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """If any: /v1 wants one of them as bearer token."""
    admin_key: str = field(default="", repr=False)
    """If set: /admin and /metrics want it. If not, they answer local peers only."""
    body_bytes_max: int = 8 << 20
    bodies_bytes_max: int = 256 << 20
    """Of all requests that are being received or tokenized."""
    vocabularies: int = 64
    """Kept in memory; the least recently used ones make way."""
    requests: RequestLimits = field(default_factory=RequestLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    text: TextSettings = field(default_factory=TextSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
