"""HTTP as bytes on sockets: requests that no client library would send."""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from run_delays import BackgroundWatch, delayed_s, run_delays


def post(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A request's bytes. `headers` come after a host and a media type, or in their place."""
    fields = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def connect(port: int, timeout_s: float = 60.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def exchange(port: int, data: bytes, timeout_s: float = 60.0) -> tuple[int, dict[str, str], bytes]:
    """Send and read one answer: status, headers, body. Status 0: closed without an answer."""
    with connect(port, timeout_s) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
        return read_answer(connection, bodiless=data.startswith(b"HEAD "))


def read_answer(
    connection: socket.socket, *, bodiless: bool = False
) -> tuple[int, dict[str, str], bytes]:
    received = b""
    with suppress(ConnectionError):
        while b"\r\n\r\n" not in received:
            part = connection.recv(1 << 16)
            if not part:
                break
            received += part
            received = received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    if not head:
        return 0, {}, b""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in lines)}
    length = 0 if bodiless else int(headers.get("content-length", 0))
    with suppress(ConnectionError):
        while len(body) < length:
            part = connection.recv(1 << 16)
            if not part:
                break
            body += part
    return int(first.split()[1]), headers, body


def error(body: bytes) -> dict[str, Any]:
    """An answer's error, which has OpenAI's shape."""
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


class HealthWatch(BackgroundWatch):
    """Asks `/health` every few milliseconds, on connections of its own, and keeps the times.

    Not in them is what the server's process and this one waited for a processor: other programs of
    the machine, and the hostile requests' own processes, say nothing about the server."""

    def __init__(self, port: int, server_pid: int) -> None:
        super().__init__()
        self._port = port
        self._pids = (server_pid, os.getpid())
        self.took_s: list[float] = []

    def _run(self) -> None:
        request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        while not self._stop.is_set():
            delays, started = run_delays(self._pids), time.monotonic()
            status, _, _ = exchange(self._port, request)
            took_s = time.monotonic() - started
            self.took_s.append(max(0.0, took_s - delayed_s(delays, run_delays(self._pids))))
            assert status == 200
            time.sleep(0.01)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.took_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
