"""New clients of a late event loop: accepting them must not take a turn of the loop for each."""

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop
from fake_gateway import FakeGateway
from late_loop import LateLoop
from served import make_gateway

from c2cserve.server.access.gate import Gate
from c2cserve.server.dashboard.live import TickTap
from c2cserve.server.settings import ServerSettings
from c2cserve.serving.doors import HttpDoor

CLIENTS = 96
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def turns_until_all_are_answered(gateway: FakeGateway) -> int:
    """Have many new clients ask a server that is late in each turn of its event loop."""

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(VERSION)
        answer = await reader.readline()
        writer.close()
        return answer

    door = HttpDoor(gateway, ServerSettings(), Gate(), None, TickTap())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = listener.getsockname()
        await door.open(listener)
        while not (await ask()).startswith(b"HTTP/1.1 200"):
            pass
        clients = [socket.create_connection(address, 20) for _ in range(CLIENTS)]
        for one in clients:
            one.sendall(VERSION)
        async with LateLoop(0.01) as late:
            found = await asyncio.to_thread(lambda: [one.recv(12) for one in clients])
        await door.close()
    for one in clients:
        one.close()
    assert found == [b"HTTP/1.1 200"] * CLIENTS
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(address, 5)
    return late.turns


def test_new_clients_do_not_wait_for_a_turn_each(byte_dir: Path, piece_dir: Path) -> None:
    turns = uvloop.run(turns_until_all_are_answered(make_gateway(byte_dir, piece_dir)))
    assert turns < CLIENTS // 2
