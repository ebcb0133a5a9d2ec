"""How the HTTP server behaves."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    api_keys: tuple[str, ...] = ()
    """If any: /v1 wants one of them as bearer token."""
    admin_key: str = ""
    """If set: /admin and /metrics want it."""
    body_bytes_max: int = 8 << 20
    tokenizer_threads: int = 2
    tokenizers: int = 64
    """Kept in memory; the least recently used ones make way."""
