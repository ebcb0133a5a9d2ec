"""Requests that cost a client little and the server much, and bytes that are no request."""

import json
import re
from typing import Any

from raw_http import post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
HUGE = "{{ 'x' * 10000000000 }}"
ON_REQUEST = "{% if messages[0].content == 'x' %}TEMPLATE{% endif %}"
"""A template that did so for any chat would be found when the model is checked."""

Costly = tuple[bytes, int, str | None]
"""A request, the status it gets, and the field that its error names."""


def completion(model: str, **fields: object) -> bytes:
    body = {"model": model, "max_tokens": 1, **fields}
    return post(COMPLETIONS, json.dumps(body).encode())


def chat(model: str, **fields: object) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], **fields}
    return post(CHAT, json.dumps(body).encode())


def costly(model: str) -> dict[str, Costly]:
    """Of one good model, by name."""

    def of_prompt(prompt: object, **fields: object) -> bytes:
        return completion(model, prompt=prompt, **fields)

    messages = [{"role": "user", "content": "x"}] * 100_000
    biases = {str(i): 1 for i in range(200_000)}
    return {
        "choices": (of_prompt(["a"] * 1000, n=128), 400, "n"),
        "ten times the choices": (of_prompt(["a"] * 10_000, n=128), 400, "n"),
        "text": (of_prompt("ab cd " * 1_250_000), 400, "prompt"),
        "text below the limit": (of_prompt("ab cd " * 600_000), 400, "prompt"),
        "wrong entries": (of_prompt([None] * 1_000_000), 400, "prompt"),
        "token ids": (of_prompt([5] * 2_000_000), 400, "prompt"),
        "many messages": (chat(model, messages=messages), 400, "messages"),
        "stop strings": (of_prompt("a", stop=["b"] * 400_000), 400, "stop"),
        "biases": (of_prompt("a", logit_bias=biases), 400, "logit_bias"),
        "deep": (post(COMPLETIONS, b"[" * 4_000_000), 400, None),
        "larger than any": (of_prompt("a" * (9 << 20)), 413, None),
    }


def costly_templates(endless: str, huge: str) -> dict[str, Costly]:
    """Of models whose templates are `ENDLESS` and `HUGE`, `ON_REQUEST`."""
    return {
        "endless template": (chat(endless), 400, "messages"),
        "huge template": (chat(huge), 400, "messages"),
    }


NO_REQUESTS = (
    b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
    b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", "GET /é HTTP/1.1\r\n\r\n".encode(),
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nx-request-id: \x01\x02\r\n\r\n",
)  # fmt: skip
"""Answered with 400, 404, 405 or 413."""


def upgrade(protocol: str) -> bytes:
    """Header lines of a wish for another protocol."""
    lines = ["connection: upgrade", f"upgrade: {protocol}", "sec-websocket-version: 13",
             "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="]  # fmt: skip
    return "".join(f"{line}\r\n" for line in lines).encode()


_DEEP = re.compile(r"\[{150}")


def is_json(text: str | bytes) -> bool:
    """As JSON and Unicode have it, and no deeper than parsers read: Python also reads NaN, Infinity
    and lone surrogates."""

    def none(word: str) -> Any:
        raise ValueError(word)

    try:
        content = json.loads(text, parse_constant=none)
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return not _DEEP.search(text if isinstance(text, str) else text.decode())
