"""Connections that ask for nothing, or slowly, take nothing from those that ask."""

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from raw_http import connect, error, exchange, post, read_answer
from server_process import ServerProcess

GOOD = post(
    "/v1/completions",
    b'{"model": "sorter-llama", "prompt": "sort: dcba", "temperature": 0, "max_tokens": 4}',
)
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
SOCKETS = 1200


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """The test itself opens them all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.alone
@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTTP/1.1\r\nx: "])
def test_more_idle_sockets_than_files(tmp_path: Path, begun: bytes) -> None:
    with ServerProcess(directory=tmp_path / "pool", files=1024) as server, ExitStack() as stack:
        expected = exchange(server.port, GOOD)[2]
        pids = server.worker_pids()
        for _ in range(SOCKETS):
            one = stack.enter_context(connect(server.port))
            if begun:
                one.sendall(begun)
        for _ in range(5):
            status, _, body = exchange(server.port, GOOD)
            assert status == 200
            assert body.split(b'"choices"')[1] == expected.split(b'"choices"')[1]
            assert server.get("/ready")[0] == 200
        assert server.worker_pids() == pids, "no worker was taken for dead"
        assert 0 < server.metric("c2cserve:http_connections") <= 768
        closed = 'c2cserve:http_connections_closed_total{reason="idle_for_room"}'
        assert server.metric(closed) >= SOCKETS - 768


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--head-timeout", "1", "--body-timeout", "1", "--idle-timeout", "1", "--send-timeout", "1",
        "--max-connections", "4",
        directory=tmp_path_factory.mktemp("strict") / "pool", slices=1,
    ) as server:  # fmt: skip
        yield server


def closed_within(connection: socket.socket, timeout_s: float) -> bytes:
    """What the server still said before it closed the connection."""
    connection.settimeout(timeout_s)
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def trickle(connection: socket.socket, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            connection.sendall(b"a")
        except OSError:
            return
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("begun", "option"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nx: ", "--head-timeout"),
        (b"\r\n", "--head-timeout"),
        (
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: 999\r\n"
            b"content-type: application/json\r\n\r\n",
            "--body-timeout",
        ),
    ],
)
def test_slow_requests_end(strict: ServerProcess, begun: bytes, option: str) -> None:
    with connect(strict.port) as connection:
        connection.sendall(begun)
        if begun.strip():
            trickle(connection, 1.5)
        status, headers, body = read_answer(connection)
        assert status == 408
        assert headers["connection"] == "close"
        assert option in error(body)["message"]


def test_idle_connections_end(strict: ServerProcess) -> None:
    with connect(strict.port) as fresh, connect(strict.port) as used:
        used.sendall(HEALTH)
        assert read_answer(used)[0] == 200
        assert closed_within(fresh, 5) == b""
        assert closed_within(used, 5) == b""


def test_a_kept_connection_serves_again(strict: ServerProcess) -> None:
    with connect(strict.port) as connection:
        for _ in range(4):
            time.sleep(0.5)
            connection.sendall(HEALTH)
            assert read_answer(connection)[0] == 200
        connection.sendall(HEALTH * 3)
        assert closed_within(connection, 5).count(b"200 OK") == 3


def test_those_that_are_answered_keep_their_place(strict: ServerProcess) -> None:
    """Four streams are all there may be: a fifth client is told so, and they go on."""
    stream = post(
        "/v1/completions",
        b'{"model": "chatter-qwen2", "prompt": "hello", "max_tokens": 200, "ignore_eos": true,'
        b' "stream": true}',
    )
    with ExitStack() as stack:
        streams = [stack.enter_context(connect(strict.port)) for _ in range(4)]
        for one in streams:
            one.sendall(stream)
            assert one.recv(12) == b"HTTP/1.1 200"
        with connect(strict.port) as fifth:
            status, _, body = read_answer(fifth)
        assert status in (0, 503)
        if status:
            assert "4 connections" in error(body)["message"]
        for one in streams:
            assert closed_within(one, 30).count(b"[DONE]") == 1


def test_upgrades_are_answered_as_http(strict: ServerProcess) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    upgrade += b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    for protocol in (b"websocket", b"h2c"):
        fields = upgrade.replace(b"websocket\r", protocol + b"\r", 1)
        with connect(strict.port) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
            answer = closed_within(connection, 5)
        assert answer.startswith(b"HTTP/1.1 200")
        with connect(strict.port) as connection:
            host = b"host: localhost\r\n"
            connection.sendall(GOOD.replace(host, host + fields) + b"more")
            answer = closed_within(connection, 10)
        assert answer.startswith(b"HTTP/1.1 200"), answer


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
        b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", "GET /é HTTP/1.1\r\n\r\n".encode(),
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nx-request-id: \x01\x02\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_request(strict: ServerProcess, data: bytes) -> None:
    status, headers, body = exchange(strict.port, data, timeout_s=5)
    assert status in (400, 404, 405, 413), (status, body)
    assert headers["x-request-id"]
    assert error(body)["message"]
