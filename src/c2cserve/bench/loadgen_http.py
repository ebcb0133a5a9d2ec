"""A small HTTP/1.1 client for load generation: asyncio protocols, httptools, kept connections.

It only posts a body and feeds the answer to a `Reply` as it arrives, at about a tenth of a general
client's cost. A slow generator would measure itself.
"""

import asyncio
import ssl
import time
from urllib.parse import urlsplit

import httptools

from c2cserve.bench.loadgen_reply import Record, Reply
from c2cserve.terminal.output import CliError


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. httptools calls the `on_*` methods."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._done: asyncio.Future[bool] | None = None
        self._content_type = b""
        self._got_bytes = False
        self.usable = True
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def exchange(self, request: bytes, reply: Reply) -> "asyncio.Future[bool]":
        """Send a request. The future is true when the answer is complete, false when the
        connection ended before."""
        assert self._transport is not None
        self.used = True
        self._got_bytes = False
        self._content_type = b""
        self._reply = reply
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    @property
    def answering(self) -> bool:
        return self._got_bytes

    def data_received(self, data: bytes) -> None:
        self._got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._reply is not None:
                self._reply.record.error = "protocol"
                self._reply.record.error_detail = str(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._end(complete=False)

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()
        self._end(complete=False)

    def on_message_begin(self) -> None:
        self._content_type = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value
        elif lower == b"x-request-id" and self._reply is not None:
            self._reply.record.request_id = value.decode(errors="replace")

    def on_headers_complete(self) -> None:
        if self._reply is not None:
            self._reply.begin(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.feed(body, time.monotonic() - self._start_s)

    def on_message_complete(self) -> None:
        if self._reply is not None:
            self._reply.finish(time.monotonic() - self._start_s)
        if not self._parser.should_keep_alive():
            self.usable = False
        self._parser = httptools.HttpResponseParser(self)
        self._end(complete=True)

    def _end(self, *, complete: bool) -> None:
        done, self._done, self._reply = self._done, None, None
        if done is not None and not done.done():
            done.set_result(complete)


class Client:
    """Kept connections to one server. `start_s` (`time.monotonic`) is the records' zero."""

    def __init__(self, url: str, api_key: str | None, start_s: float, timeout_s: float) -> None:
        """`url` is the server's root or its `/v1`. Raises `CliError` for what is not a URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CliError(f"{url!r} is not a URL such as http://127.0.0.1:8000", 2)
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        if api_key:
            self._headers += f"authorization: Bearer {api_key}\r\n"
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def post(
        self, path: str, body: bytes, record: Record, *, keep_text: bool = False
    ) -> None:
        """Run one request. The result, or its failure, is in `record`."""
        request = (
            f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(request, record, keep_text=keep_text)
        except TimeoutError:
            record.error, record.error_detail = "timeout", f"no end after {self._timeout_s:g} s"
        except OSError as error:
            record.error, record.error_detail = "connect", str(error)
        if record.end_s < 0:
            record.end_s = self._now()

    async def _send(self, request: bytes, record: Record, *, keep_text: bool) -> None:
        while True:
            connection = await self._connection()
            fresh = not connection.used
            reply = Reply(record, keep_text=keep_text)
            try:
                if record.sent_s < 0:
                    record.sent_s = self._now()
                complete = await connection.exchange(request, reply)
            except asyncio.CancelledError:
                # A time-out: closing tells the server that the client is gone.
                connection.close()
                raise
            if complete:
                if connection.usable:
                    self._idle.append(connection)
                return
            if fresh or connection.answering or record.error:
                record.error = record.error or "disconnected"
                return
            # A kept connection that the server had closed in the meantime: not the request's fault.

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        _, made = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._start_s), self._host, self._port, ssl=self._tls
        )
        return made

    def _now(self) -> float:
        return time.monotonic() - self._start_s

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)
