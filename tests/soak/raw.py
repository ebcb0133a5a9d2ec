"""Bytes on connections: what no client library would send, and reading whatever comes back."""

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LINE_BYTES = 1 << 20
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing throws away what is unsent, and resets."""


@dataclass(slots=True)
class Answer:
    sent_s: float
    status: int = 0
    """0: the connection ended without an answer."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    whole: bool = False
    """As long as its headers say, or ended as they say."""
    ended_s: float = 0.0

    @property
    def error(self) -> Any:
        """None: there is none, or it is no JSON."""
        try:
            content: Any = json.loads(self.body)
        except ValueError:
            return None
        return content.get("error") if isinstance(content, dict) else None


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> bool:
        """False: the server has closed. Waits while the server does not read."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            return False
        return True

    def send_end(self) -> None:
        """Nothing more will be sent; the answer can still be read."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def reset(self) -> None:
        """Go away at once."""
        given: Any = self._writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """The next one. A connection that ends early is an answer that is not whole."""
        answer = Answer(time.monotonic())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._read(answer, bodiless)
        answer.ended_s = time.monotonic()
        return answer

    async def _read(self, answer: Answer, bodiless: bool) -> None:
        head = await self._reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100 "):
            head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        answer.status = int(first.split()[1])
        pairs = (line.partition(": ") for line in lines)
        answer.headers = {name.lower(): value for name, _, value in pairs}
        if answer.headers.get("transfer-encoding") == "chunked" and not bodiless:
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                answer.body += (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        elif not bodiless:
            length = int(answer.headers.get("content-length", 0))
            answer.body = await self._reader.readexactly(length)
        answer.whole = True


@contextlib.asynccontextmanager
async def connected(url: str, *, window: int | None = None) -> AsyncGenerator[Connection]:
    """`window`: bytes that the server may send ahead of being read. Raises OSError."""
    split = urlsplit(url)
    plain = socket.socket()
    plain.setblocking(False)
    if window is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    try:
        await asyncio.get_running_loop().sock_connect(plain, (split.hostname, split.port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=_LINE_BYTES)
    except BaseException:
        plain.close()
        raise
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(url: str, data: bytes) -> Answer:
    """Send and read one answer; sending need not end before the answer comes."""
    sent_s = time.monotonic()
    async with connected(url) as connection:
        sending = asyncio.create_task(connection.send(data))
        try:
            answer = await connection.answer(bodiless=data.startswith(b"HEAD "))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
    answer.sent_s = sent_s
    return answer
