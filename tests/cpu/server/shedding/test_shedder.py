"""Refusals in an overload, before the application sees a request."""

import json
import logging
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from raw import BODY, answers, raw
from served import Served, make_gateway

from c2cserve.server.settings import ConnectionLimits, ServerSettings


def test_a_refusal_is_whole(overloaded: Served) -> None:
    answer = overloaded.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "8"
    assert answer.headers["retry-after-ms"] == "7200"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "application/json"
    assert "date" in answer.headers
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert answer.json()["error"]["message"] == "it would come late"


def test_a_kept_connection_goes_on(overloaded: Served) -> None:
    with socket.create_connection(("127.0.0.1", overloaded.port), 10) as connection:
        whole = json.dumps(BODY).encode()
        for _ in range(3):
            connection.sendall(raw(whole))
            [(status, _)] = answers(connection, 1)
            assert status == 429
        overloaded.gateway.overloaded = None
        overloaded.says([70])
        connection.sendall(raw(whole))
        [(status, _)] = answers(connection, 1)
        assert status == 200


def test_requests_in_one_piece_are_answered_in_order(overloaded: Served) -> None:
    whole = raw(json.dumps(BODY).encode())
    other = raw(json.dumps({**BODY, "model": "none"}).encode())
    with socket.create_connection(("127.0.0.1", overloaded.port), 10) as connection:
        connection.sendall(whole + other + whole)
        statuses = [status for status, _ in answers(connection, 3)]
    assert statuses == [429, 404, 429]


def test_a_body_in_parts_is_waited_for(overloaded: Served) -> None:
    whole = raw(json.dumps(BODY).encode())
    with socket.create_connection(("127.0.0.1", overloaded.port), 10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(whole), 40):
            connection.sendall(whole[at : at + 40])
        [(status, _)] = answers(connection, 1)
    assert status == 429


def test_a_client_that_ends_its_connection_gets_an_answer(overloaded: Served) -> None:
    with socket.create_connection(("127.0.0.1", overloaded.port), 10) as connection:
        connection.sendall(raw(json.dumps(BODY).encode(), "connection: close\r\n"))
        [(status, _)] = answers(connection, 1)
        assert status == 429
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"origin": "https://elsewhere.example"}, BODY, 403),
        ({"content-type": "text/plain"}, BODY, 415),
        ({}, {**BODY, "model": "none"}, 404),
        ({"x-slo-ttft-ms": "soon"}, BODY, 400),
    ],
)
def test_a_fault_is_told_in_an_overload_too(
    overloaded: Served, headers: dict[str, str], body: dict[str, object], status: int
) -> None:
    answer = overloaded.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == status


def test_refusals_are_counted_and_logged_once_a_second_at_most(
    overloaded: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def counted() -> float:
        name = 'c2cserve:http_responses_total{route="/v1/completions",status="429"}'
        lines = overloaded.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = counted()
    with caplog.at_level(logging.INFO, "c2cserve.server.shedding.shedder"):
        for _ in range(20):
            overloaded.http.post("/v1/completions", json=BODY)
    assert counted() == before + 20
    lines = [one for one in caplog.records if one.name == "c2cserve.server.shedding.shedder"]
    assert len(lines) <= 10, "at most one each second"


def test_a_last_request_may_take_longer_than_an_idle_connection(
    byte_dir: Path, piece_dir: Path
) -> None:
    """Its connection is closed after it; no timer of an earlier phase may close it before."""
    limits = ConnectionLimits(idle_timeout_s=0.2, head_timeout_s=0.2, body_timeout_s=0.2)
    settings = ServerSettings(connections=limits)
    with Served(make_gateway(byte_dir, piece_dir), settings) as served:
        served.says([70], delay_s=0.6)
        with socket.create_connection(("127.0.0.1", served.port), 10) as connection:
            connection.sendall(raw(json.dumps(BODY).encode(), "connection: close\r\n"))
            [(status, _)] = answers(connection, 1)
    assert status == 200


def test_what_was_let_in_at_the_same_time_is_counted(served: Served) -> None:
    """Requests that are read in one turn of the event loop are not prepared before the next one:
    each must be judged as if those before it were under way."""
    served.gateway.may_be_refused = True
    served.says([70])
    whole = raw(json.dumps(BODY).encode())
    with ExitStack() as stack:
        made = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 10))
            for _ in range(8)
        ]
        for one in made:  # the server has accepted them all
            one.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answers(one, 1)
        with served.held_up():
            for one in made:
                one.sendall(whole)
        statuses = [answers(one, 1)[0][0] for one in made]
    assert statuses == [200] * 8
    counted = [sum(preparing.values()) for _, _, preparing in served.gateway.gated]
    assert len(counted) == 8, "each is judged once"
    assert counted == list(range(8)), "all that came before are under way"
