"""Requests as bytes, and their answers."""

import json
import socket
from typing import Any

from served import BYTE

BODY: dict[str, Any] = {"model": BYTE, "prompt": "hello", "max_tokens": 3}


def raw(body: bytes, head: str = "") -> bytes:
    fields = f"host: localhost\r\ncontent-type: application/json\r\n{head}"
    return (
        f"POST /v1/completions HTTP/1.1\r\n{fields}content-length: {len(body)}\r\n\r\n"
    ).encode() + body


def request(head: str = "", **more: object) -> bytes:
    return raw(json.dumps({**BODY, **more}).encode(), head)


def answers(connection: socket.socket, count: int) -> list[tuple[int, dict[str, object]]]:
    return [(status, content) for status, _, content in whole_answers(connection, count)]


def whole_answers(
    connection: socket.socket, count: int
) -> list[tuple[int, dict[str, str], dict[str, Any]]]:
    """Status, fields and content of the next answers."""
    found: list[tuple[int, dict[str, str], dict[str, Any]]] = []
    with connection.makefile("rb") as file:
        while len(found) < count:
            status = int(file.readline().split()[1])
            fields: dict[str, str] = {}
            while line := file.readline().decode().strip():
                name, _, value = line.partition(": ")
                fields[name] = value
            content = json.loads(file.read(int(fields["content-length"])))
            found.append((status, fields, content))
    return found
