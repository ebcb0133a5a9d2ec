"""Refusals of requests that are not framed as most clients frame them. A head that is known from
another refusal must not be taken for theirs, and the connection must stay in step."""

import json
import socket
import time

import pytest
from raw import BODY, raw, whole_answers
from served import Served

CONTENT = json.dumps(BODY).encode()
PLAIN = raw(CONTENT)
CHUNKED = PLAIN.partition(b"content-length")[
    0
] + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)


def statuses(served: Served, *pieces: bytes, count: int, ends: bool = False) -> list[int]:
    """Send pieces one after another on a connection where a refusal has made its head known."""
    with socket.create_connection(("127.0.0.1", served.port), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(PLAIN)
        assert whole_answers(connection, 1)[0][0] == 429
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.02)
        found = [status for status, _, _ in whole_answers(connection, count)]
        if ends:
            assert connection.recv(1) == b""
        return found


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (CHUNKED, 429),
        (PLAIN.replace(b"POST /", b"POST http://localhost/", 1), 429),
        (PLAIN.replace(b"completions ", b"completions?api-version=1 ", 1), 429),
        (PLAIN.replace(b"application/json", b"text/plain", 1), 415),
        (PLAIN.replace(b"completions ", b"completion ", 1), 404),
    ],
)
def test_a_body_that_comes_later_is_none_of_the_next_request_s(
    overloaded: Served, first: bytes, status: int
) -> None:
    found = statuses(overloaded, first[:-30], first[-30:] + PLAIN, PLAIN, count=3)
    assert found == [status, 429, 429]


def test_who_asks_first_whether_to_send_a_body_gets_a_refusal(overloaded: Served) -> None:
    asking = raw(CONTENT, "expect: 100-continue\r\n")
    with socket.create_connection(("127.0.0.1", overloaded.port), 30) as connection:
        connection.sendall(asking[: -len(CONTENT)])
        assert connection.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(CONTENT + PLAIN)
        found = [status for status, _, _ in whole_answers(connection, 2)]
    assert found == [429, 429]


def test_http_1_0_is_refused_and_its_connection_closed(overloaded: Served) -> None:
    old = PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    assert statuses(overloaded, old, count=1, ends=True) == [429]


@pytest.mark.parametrize("more", ["transfer-encoding: chunked\r\n", "content-length: 5\r\n"])
def test_two_lengths_are_no_request(overloaded: Served, more: str) -> None:
    assert statuses(overloaded, raw(CONTENT, more) + PLAIN, count=1, ends=True) == [400]
