"""A client that goes away takes its work with it, at once."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from served import BYTE, Served

from c2cserve.server.disconnect import unless_disconnected

pytestmark = pytest.mark.alone

COMPLETION = ("/v1/completions", {"model": BYTE, "prompt": "hello", "max_tokens": 200})
CHAT = (
    "/v1/chat/completions",
    {"model": BYTE, "messages": [{"role": "user", "content": "hello"}]},
)
AT_ONCE_S = 0.5
HEAD = b"host: localhost\r\ncontent-type: application/json\r\n\r\n"


def send(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\ncontent-length: {len(data)}\r\n".encode() + HEAD
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    connection.sendall(head + data)
    return connection


def wait_for(check: Callable[[], bool], timeout_s: float = AT_ONCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.002)


def gone(served: Served) -> bool:
    """Every job that was begun has ended or was cancelled."""
    gateway = served.gateway
    over = {*gateway.ended, *gateway.cancelled}
    return {job.request.id for job in gateway.jobs} <= over


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path_body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_mid_stream(served: Served, path_body: tuple[str, dict[str, Any]], n: int) -> None:
    path, body = path_body
    served.says([50, 51, 52], forever=True, delay_s=0.005)
    connection = send(served, path, {**body, "stream": True, "n": n})
    received = b""
    while received.count(b"data: ") < 5 * n:
        received += connection.recv(1 << 16)
    assert not gone(served)
    connection.close()
    wait_for(lambda: gone(served))
    assert len(served.gateway.jobs) == n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path_body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_while_a_whole_answer_is_made(
    served: Served, path_body: tuple[str, dict[str, Any]], n: int
) -> None:
    path, body = path_body
    served.says([50], forever=True, delay_s=0.005)
    connection = send(served, path, {**body, "n": n})
    wait_for(lambda: len(served.gateway.jobs) == n)
    assert not gone(served)
    connection.close()
    wait_for(lambda: gone(served))


def test_others_go_on(served: Served) -> None:
    served.says([50, 51], forever=True, delay_s=0.002)
    stays = send(served, COMPLETION[0], {**COMPLETION[1], "stream": True})
    leaves = send(served, COMPLETION[0], {**COMPLETION[1], "stream": True})
    wait_for(lambda: len(served.gateway.jobs) == 2)
    leaves.close()
    wait_for(lambda: len(served.gateway.ended) == 1)
    for _ in range(20):
        assert stays.recv(1 << 16)
    stays.close()
    wait_for(lambda: gone(served))


def test_a_slow_reader_holds_only_itself_up(served: Served) -> None:
    served.says(list(range(50, 90)), forever=True)
    slow = send(served, COMPLETION[0], {**COMPLETION[1], "stream": True})
    wait_for(lambda: len(served.gateway.jobs) == 1)
    assert served.http.get("/health").status_code == 200
    slow.close()
    wait_for(lambda: gone(served))


def test_half_a_request(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99\r\n" + HEAD + b"{")
        time.sleep(0.05)
    assert served.http.get("/health").status_code == 200
    assert served.gateway.jobs == []


def test_before_the_first_token_of_a_stream(served: Served) -> None:
    """Long queues are where clients give up."""
    served.says([50], delay_s=30.0)
    connection = send(served, COMPLETION[0], {**COMPLETION[1], "stream": True})
    wait_for(lambda: len(served.gateway.jobs) == 1)
    connection.close()
    wait_for(lambda: gone(served))


class Client:
    """The other end of `receive`."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_work_that_ends_first_is_answered_or_raised() -> None:
    client = Client()

    async def work(result: int) -> int:
        await asyncio.sleep(0)
        return 10 // result

    assert await unless_disconnected(client.receive, work(2)) == 5
    with pytest.raises(ZeroDivisionError):
        await unless_disconnected(client.receive, work(0))
    client.gone.set()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "nobody watches any more"


@pytest.mark.parametrize("client_too", [False, True])
async def test_another_cancellation_reaches_its_caller(client_too: bool) -> None:
    client, started = Client(), asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(30)

    task = asyncio.create_task(unless_disconnected(client.receive, work()))
    await started.wait()
    if client_too:
        client.gone.set()
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_who_leaves_gets_nothing_and_the_task_goes_on() -> None:
    client = Client()
    asyncio.get_running_loop().call_soon(client.gone.set)
    assert await unless_disconnected(client.receive, asyncio.sleep(30, "late")) is None
    assert await asyncio.sleep(0, "on") == "on"
