"""Connections that ask for nothing, or slowly, take nothing from those that ask."""

import re
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hostile_requests import NO_REQUESTS, upgrade
from raw_http import connect, error, exchange, post, read_answer
from server_process import ServerProcess, paused, wait_until

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
        "--head-timeout", "2", "--body-timeout", "2", "--idle-timeout", "2.5",
        "--send-timeout", "2",
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


def trickle(connection: socket.socket) -> None:
    """Send a byte now and then until there is an answer."""
    while not select.select([connection], [], [], 0.1)[0]:
        with suppress(OSError):
            connection.sendall(b"a")


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
            trickle(connection)
        status, headers, body = read_answer(connection)
        assert status == 408
        assert headers["connection"] == "close"
        assert option in error(body)["message"]


def test_idle_connections_end(strict: ServerProcess) -> None:
    with connect(strict.port) as fresh, connect(strict.port) as used:
        used.sendall(HEALTH)
        assert read_answer(used)[0] == 200
        assert closed_within(fresh, 60) == b""
        assert closed_within(used, 60) == b""


def test_a_kept_connection_serves_again(strict: ServerProcess) -> None:
    with connect(strict.port) as connection:
        for _ in range(3):
            time.sleep(0.9)  # well below --idle-timeout, and above it all together
            connection.sendall(HEALTH)
            assert read_answer(connection)[0] == 200
        connection.sendall(HEALTH * 3)
        assert closed_within(connection, 60).count(b"200 OK") == 3


def test_those_that_are_answered_keep_their_place(strict: ServerProcess) -> None:
    """Four streams are all there may be: a fifth client is told so, and they go on."""
    stream = post(
        "/v1/completions",
        b'{"model": "chatter-qwen2", "prompt": "hello", "max_tokens": 400, "ignore_eos": true,'
        b' "stream": true}',
    )
    workers = strict.worker_pids()
    with ExitStack() as stack:
        streams = list[socket.socket]()
        for _ in range(4):  # a connection that says nothing at first is closed
            streams.append(stack.enter_context(connect(strict.port)))
            streams[-1].sendall(stream)
        for one in streams:
            assert one.recv(12) == b"HTTP/1.1 200"
        with paused(workers), connect(strict.port) as fifth:
            status, _, body = read_answer(fifth)
        assert status in (0, 503)
        if status:
            assert "4 connections" in error(body)["message"]
        for one in streams:
            assert closed_within(one, 60).count(b"[DONE]") == 1


def test_upgrades_are_answered_as_http(strict: ServerProcess) -> None:
    for protocol in ("websocket", "h2c"):
        fields = upgrade(protocol)
        with connect(strict.port) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
            assert read_answer(connection)[0] == 200
        with connect(strict.port) as connection:
            host = b"host: localhost\r\n"
            connection.sendall(GOOD.replace(host, host + fields) + b"more")
            status, _, body = read_answer(connection)
        assert status == 200, body


STREAM_OF_MEGABYTES = post(
    "/v1/completions",
    b'{"model": "chatter-qwen2", "prompt": "hello", "max_tokens": 200, "ignore_eos": true,'
    b' "n": 64, "logprobs": 20, "stream": true}',
)


@pytest.mark.parametrize(
    "data", [STREAM_OF_MEGABYTES, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000],
    ids=["a stream", "many answers"],
)  # fmt: skip
def test_who_takes_nothing_of_an_answer_is_cut(strict: ServerProcess, data: bytes) -> None:
    """Within the time and a little; the work ends with it, and others are served all along."""
    closed = 'c2cserve:http_connections_closed_total{reason="send_timeout"}'
    before = strict.metric(closed)
    with socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.connect(("127.0.0.1", strict.port))
        greedy.setblocking(False)
        with suppress(BlockingIOError):  # the server reads no more while it cannot send
            greedy.send(data)

        def cut() -> bool:
            assert exchange(strict.port, GOOD)[0] == 200
            return strict.metric(closed) == before + 1

        wait_until(cut, 60, "it is cut")
        wait_until(lambda: not strict.state()["running"], 60, "its work has ended")
        greedy.setblocking(True)
        received = b""
        with suppress(ConnectionError):
            received = closed_within(greedy, 60)
        assert b"[DONE]" not in received
        assert received.count(b"HTTP/1.1 200") < 2000


def test_who_takes_an_answer_slowly_gets_all_of_it(strict: ServerProcess) -> None:
    """The limit is on taking nothing, not on how long it takes to take all."""
    data = STREAM_OF_MEGABYTES.replace(b'"stream": true', b'"echo":   true')
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", strict.port))
        slow.sendall(data)
        head = slow.recv(4096)
        began_s, received = time.monotonic(), len(head)
        while part := slow.recv(1 << 16):
            received += len(part)
            time.sleep(0.03)
        took_s = time.monotonic() - began_s
    fields = head.partition(b"\r\n\r\n")[0].lower()
    length = int(fields.split(b"content-length: ")[1].split(b"\r\n")[0])
    assert received == len(fields) + len(b"\r\n\r\n") + length
    assert took_s > 2.0, "longer than --send-timeout"


def test_who_leaves_after_several_requests_cancels_the_first(strict: ServerProcess) -> None:
    """It is being answered while the next ones wait in the connection."""
    long = STREAM_OF_MEGABYTES.replace(b'"stream": true', b'"echo":   true')
    tokens = re.escape('vllm:generation_tokens_total{model_name="chatter-qwen2"}')
    before = strict.metric(tokens)
    with connect(strict.port) as leaving:
        leaving.sendall(long * 3)
        wait_until(lambda: strict.state()["running"], 60, "it runs", poll_s=0.01)
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not strict.state()["running"], 60, "its work has ended")
    assert strict.metric(tokens) - before < 64 * 200
    assert not [line for line in strict.logs() if line["level"] == "error"]


EACH_BODY, ALL_BODIES = 8 << 20, 256 << 20
"""What `serve` allows a body, and all of them together, by default."""


def test_all_bodies_together_have_a_budget(tmp_path: Path) -> None:
    """Bodies that do not end fill it: the next one gets 429, what has no body is answered. When
    they leave, what they took is free again."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += f"content-type: application/json\r\ncontent-length: {EACH_BODY}\r\n\r\n"
    with ServerProcess(directory=tmp_path / "pool", slices=1) as server:
        with ExitStack() as stack:

            def send() -> None:
                one = stack.enter_context(connect(server.port))
                with suppress(ConnectionError):  # it is the one that is refused
                    one.sendall(head.encode() + bytes(EACH_BODY - 1))

            def spent() -> bool:
                """A good request among them may cost one of them its place: another takes it."""
                if exchange(server.port, GOOD)[0] == 429:
                    return True
                send()
                return False

            for _ in range(ALL_BODIES // EACH_BODY):
                send()
            wait_until(spent, 60, "the budget is spent", poll_s=0.3)
            status, headers, body = exchange(server.port, GOOD)
            assert (status, error(body)["code"]) == (429, "rate_limit_exceeded")
            assert str(ALL_BODIES) in error(body)["message"]
            assert headers["retry-after"].isdecimal()
            assert server.get("/health")[0] == 200
            assert server.get("/v1/models")[0] == 200
        wait_until(lambda: exchange(server.port, GOOD)[0] == 200, 60, "the budget is free again")
        assert server.memory_bytes() < 1 << 30


@pytest.mark.parametrize("data", NO_REQUESTS)
def test_what_is_no_request(strict: ServerProcess, data: bytes) -> None:
    status, headers, body = exchange(strict.port, data)
    assert status in (400, 404, 405, 413), (status, body)
    assert headers["x-request-id"]
    assert error(body)["message"]
