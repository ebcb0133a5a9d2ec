"""What the outside world comes in by: HTTP for clients, or a node's port for fronts."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Protocol

import uvicorn

from c2cserve.runtime.gateway import Gateway
from c2cserve.server.access.gate import Gate
from c2cserve.server.dashboard.live import TickTap
from c2cserve.server.http import http_config
from c2cserve.server.settings import ServerSettings
from c2cserve.server.tls import Tls

_ACCEPTS = 32
"""Connections that are accepted in a turn of the event loop. uvloop accepts one for each socket
that listens. With one socket and turns of 50 ms, 20 clients a second would come in. Others would
wait for as long as those keep coming."""


class Door(Protocol):
    async def open(self, listener: socket.socket) -> None: ...

    async def close(self) -> None:
        """Finish what is being sent, and take nothing more."""
        ...


class HttpDoor:
    """The HTTP server before a gateway."""

    def __init__(
        self, gateway: Gateway, settings: ServerSettings, gate: Gate, tls: Tls | None, tap: TickTap
    ) -> None:
        self._http = _HttpServer(http_config(gateway, settings, gate, tls=tls, tap=tap))
        self._serving: asyncio.Task[None] | None = None

    async def open(self, listener: socket.socket) -> None:
        listeners = [listener, *(listener.dup() for _ in range(_ACCEPTS - 1))]
        self._serving = asyncio.create_task(self._http.serve(listeners))

    async def close(self) -> None:
        self._http.should_exit = True
        if self._serving is not None:
            await self._serving


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop listening instead of draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
