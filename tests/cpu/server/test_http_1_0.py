"""Clients of HTTP/1.0, as nginx is by default to what is behind it, and many small ones are."""

import json
import socket
from typing import Any

import pytest
from served import BYTE, Served

BODY: dict[str, Any] = {"model": BYTE, "prompt": "hello", "max_tokens": 3}


def answer(served: Served, head: str, body: bytes = b"") -> tuple[dict[str, str], bytes]:
    """The fields and the content of an answer, which ends with its connection."""
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    data = f"{head} HTTP/1.0\r\n{fields if body else ''}\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", served.port), 30) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    first, _, rest = received.partition(b"\r\n")
    assert first.split()[1] == b"200"
    lines, _, content = rest.partition(b"\r\n\r\n")
    found = dict(line.split(": ", 1) for line in lines.decode().split("\r\n"))
    assert found["connection"] == "close"
    return found, content


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_ends_with_its_connection(served: Served, chat: bool) -> None:
    served.says([70, 71, 72])
    body = {**BODY, "stream": True}
    path = "/v1/completions"
    if chat:
        body["messages"], path = (
            [{"role": "user", "content": body.pop("prompt")}],
            "/v1/chat/completions",
        )
    fields, content = answer(served, f"POST {path}", json.dumps(body).encode())
    assert "transfer-encoding" not in fields
    assert "content-length" not in fields
    events = content.decode().split("\n\n")
    assert all(one.startswith("data: ") for one in events[:-1]), content
    assert events[-2:] == ["data: [DONE]", ""]


def test_a_whole_answer_has_its_length(served: Served) -> None:
    served.says([70, 71, 72])
    fields, content = answer(served, "POST /v1/completions", json.dumps(BODY).encode())
    assert int(fields["content-length"]) == len(content)
    assert json.loads(content)["choices"]


@pytest.mark.parametrize("head", ["GET /health", "HEAD /health", "GET /metrics"])
def test_what_else_is_asked(served: Served, head: str) -> None:
    fields, content = answer(served, head)
    assert "transfer-encoding" not in fields
    assert bool(content) == head.startswith("GET")
