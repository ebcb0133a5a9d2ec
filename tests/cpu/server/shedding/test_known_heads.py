"""A connection whose requests all have the same head: what is refused is not parsed again."""

import json
import socket
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from raw import BODY, answers, raw, request, whole_answers
from served import BYTE, Served, make_gateway

from c2cserve.runtime.gateway import Refused
from c2cserve.server.access.gate import Gate
from c2cserve.server.settings import ConnectionLimits, ServerSettings
from c2cserve.server.shedding.heads import Caller, KnownHeads

CALLER = Caller("/v1/completions", {}, {})


@contextmanager
def connected(served: Served) -> Generator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", served.port), 10)) as connection:
        yield connection


def known(data: bytes, body: bytes) -> KnownHeads:
    found = KnownHeads()
    found.hold(CALLER, data, len(body))
    assert found.find(data) is not None
    return found


# ---- what is known again --------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(st.binary(max_size=40), st.binary(max_size=2000), st.integers(0, 3000))
def test_the_body_behind_a_known_head_is_found_if_it_is_whole(
    first: bytes, then: bytes, cut: int
) -> None:
    heads = known(raw(first), first)
    for more in ("", "x-request-id: 7\r\n"):
        heads.hold(CALLER, raw(first, more), len(first))
        whole = raw(then, more.replace("7", "another"))
        found = heads.find(whole)
        assert found is not None
        assert (found.body, found.id) == (then, "another" if more else "")
        if cut < len(whole):
            assert heads.find(whole[:cut]) is None
        assert heads.find(whole + b"x") is None


def test_another_head_is_not_known() -> None:
    heads = known(raw(b"{}"), b"{}")
    assert heads.find(raw(b"{}", "x-slo-ttft-ms: 5\r\n")) is None
    assert heads.find(raw(b"{}", "x-request-id: a b\r\n")) is None
    assert heads.find(raw(b"{}", "x-request-id: a\nhost: b\r\n")) is None
    assert heads.find(raw(b"{}", "content-length: 2\r\n")) is None
    assert heads.find(raw(b"{}").replace(b"localhost", b"localhosu")) is None
    assert heads.find(raw(b"{}").replace(b": 2", b": 2, 2")) is None
    assert heads.find(raw(b"{}").replace(b": 2", b": +2")) is None
    assert heads.find(raw(b"{}").replace(b": 2", b": ")) is None


@pytest.mark.parametrize(
    "data",
    [
        raw(b"{}") + raw(b"{}"),
        raw(b"{}", "x: " + "y" * 5000 + "\r\n"),
        raw(b"{}", "expect: 100-continue\r\n"),
        raw(b"{}", "connection: upgrade\r\nupgrade: h2c\r\n"),
        raw(b"{}", "content-length: 2\r\n"),
        raw(b"{}", "Content-Length: 2, 2\r\n"),
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"{}",
        b"",
    ],
)
def test_heads_that_are_not_held(data: bytes) -> None:
    heads = KnownHeads()
    heads.hold(CALLER, data, 2)
    assert heads.find(data) is None


def test_heads_without_number_take_little_memory() -> None:
    heads = KnownHeads()
    for number in range(2000):
        heads.hold(CALLER, raw(b"{}", f"x-own: {number}\r\n"), 2)
    held = [heads.find(raw(b"{}", f"x-own: {number}\r\n")) for number in range(2000)]
    assert sum(one is not None for one in held) == 1024
    assert held[-1] is not None


# ---- on a connection ------------------------------------------------------------------------


def test_refusals_of_a_known_head_are_whole(overloaded: Served) -> None:
    with connected(overloaded) as connection:
        ids: list[str] = []
        for prompt in ("a", "a longer one", "b"):
            connection.sendall(request(prompt=prompt))
            [(status, fields, content)] = whole_answers(connection, 1)
            assert status == 429
            assert fields["retry-after-ms"] == "7200"
            assert "date" in fields
            assert content["error"]["code"] == "rate_limit_exceeded"
            ids.append(fields["x-request-id"])
    assert len(set(ids)) == 3
    assert len(overloaded.gateway.gated) == 3


def test_each_refusal_is_counted(overloaded: Served) -> None:
    def counted() -> float:
        name = 'c2cserve:http_responses_total{route="/v1/completions",status="429"}'
        lines = overloaded.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = counted()
    with connected(overloaded) as connection:
        for _ in range(5):
            connection.sendall(request())
            answers(connection, 1)
    assert counted() == before + 5


def test_heads_may_alternate(overloaded: Served) -> None:
    with connected(overloaded) as connection:
        for given_id in ("one", "two", "two", "one"):
            connection.sendall(request(f"x-request-id: {given_id}\r\n"))
            [(status, fields, _)] = whole_answers(connection, 1)
            assert (status, fields["x-request-id"]) == (429, given_id)


def test_a_head_is_known_on_other_connections(overloaded: Served) -> None:
    for more in ("", "connection: close\r\n", "connection: close\r\n", ""):
        for given_id in ("one", "two"):
            with connected(overloaded) as connection:
                connection.sendall(request(f"{more}x-request-id: {given_id}\r\n"))
                [(status, fields, _)] = whole_answers(connection, 1)
                assert (status, fields["x-request-id"]) == (429, given_id)
                assert ("connection" in fields) == bool(more)
                if more:
                    assert connection.recv(1) == b""


def test_heads_may_differ_for_long(overloaded: Served) -> None:
    with connected(overloaded) as connection:
        for number in [*range(12), 11, 11]:
            connection.sendall(request(f"x-request-id: {number}\r\n"))
            [(status, fields, _)] = whole_answers(connection, 1)
            assert (status, fields["x-request-id"]) == (429, str(number))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"", 400),
        (json.dumps({**BODY, "model": "none"}).encode(), 404),
    ],
)
def test_a_fault_behind_a_known_head_is_told(overloaded: Served, body: bytes, status: int) -> None:
    with connected(overloaded) as connection:
        connection.sendall(request())
        assert answers(connection, 1)[0][0] == 429
        for _ in range(2):
            connection.sendall(raw(body))
            assert answers(connection, 1)[0][0] == status
        connection.sendall(request())
        assert answers(connection, 1)[0][0] == 429


def test_what_can_be_in_time_comes_in_and_is_judged_once(overloaded: Served) -> None:
    overloaded.says([70])
    with connected(overloaded) as connection:
        connection.sendall(request())
        assert answers(connection, 1)[0][0] == 429
        overloaded.gateway.overloaded, overloaded.gateway.may_be_refused = None, True
        overloaded.gateway.gated.clear()
        for _ in range(3):
            connection.sendall(request())
            assert answers(connection, 1)[0][0] == 200
    assert len(overloaded.gateway.gated) == 3


def test_a_body_in_parts_behind_a_known_head_is_waited_for(overloaded: Served) -> None:
    with connected(overloaded) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request())
        assert answers(connection, 1)[0][0] == 429
        whole = request(prompt="x" * 500)
        for at in range(0, len(whole), 100):
            connection.sendall(whole[at : at + 100])
            time.sleep(0.005)
        assert answers(connection, 1)[0][0] == 429


def test_requests_in_one_piece_behind_a_known_head_are_answered_in_order(
    overloaded: Served,
) -> None:
    with connected(overloaded) as connection:
        connection.sendall(request())
        answers(connection, 1)
        connection.sendall(request() + request(model="none") + request())
        assert [status for status, _ in answers(connection, 3)] == [429, 404, 429]


def test_a_key_that_is_taken_back_is_not_remembered(byte_dir: Path, piece_dir: Path) -> None:
    """The key is looked up for each request: 401 comes before 429."""
    gate = Gate(["sesame"])
    gateway = make_gateway(byte_dir, piece_dir)
    gateway.overloaded = Refused(429, "it would come late", 7.2)
    with Served(gateway, ServerSettings(), gate) as served, connected(served) as connection:
        head = "authorization: Bearer sesame\r\n"
        for _ in range(2):
            connection.sendall(request(head))
            assert answers(connection, 1)[0][0] == 429
        connection.sendall(request("authorization: Bearer guess\r\n"))
        assert answers(connection, 1)[0][0] == 401
        connection.sendall(request(head))
        assert answers(connection, 1)[0][0] == 429
        gate.keyring = Gate(["other"]).keyring
        connection.sendall(request(head))
        assert answers(connection, 1)[0][0] == 401


def test_a_refusal_begins_the_idle_time_anew(byte_dir: Path, piece_dir: Path) -> None:
    limits = ConnectionLimits(idle_timeout_s=0.4)
    gateway = make_gateway(byte_dir, piece_dir)
    gateway.overloaded = Refused(429, "it would come late", 7.2)
    settings_ = ServerSettings(connections=limits)
    with Served(gateway, settings_) as served, connected(served) as connection:
        for _ in range(4):
            connection.sendall(request())
            assert answers(connection, 1)[0][0] == 429
            time.sleep(0.25)
        last_s = time.monotonic()
        assert connection.recv(1) == b"", "closed when it has been idle for long"
        assert time.monotonic() - last_s < 5.0


def test_aliases_lead_to_models_behind_a_known_head(overloaded: Served) -> None:
    with connected(overloaded) as connection:
        for name in (BYTE, "nick", BYTE):
            connection.sendall(request(model=name))
            assert answers(connection, 1)[0][0] == 429
