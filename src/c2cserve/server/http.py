"""HTTP on sockets: uvicorn's protocol, with bounds on what a client may send and how slowly.

A connection is in one of four phases. It is idle, sends the head of a request (its line and
headers), sends its body, or waits for its answer. Each phase has a time limit, except the answer.
That takes as long as the model does, provided that the client goes on reading it.
"""

import asyncio
import fcntl
import math
import secrets
import termios
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from c2cserve.runtime.gateway import Gateway
from c2cserve.server.access.gate import Gate
from c2cserve.server.app import create_app
from c2cserve.server.connections import Connections
from c2cserve.server.dashboard.live import TickTap
from c2cserve.server.errors import ApiError
from c2cserve.server.settings import ServerSettings
from c2cserve.server.shedding.arrival import ArrivalClock
from c2cserve.server.shedding.protocol import SheddingProtocol
from c2cserve.server.tls import Tls
from c2cserve.server.unchunked import unchunked

_LINGER_S = 1.0
"""A refused client may still be sending. If the connection closed at once, the answer could be
lost."""
_GRACE_S = 5
"""Time for open connections when the server ends."""
_READ_BYTES = 1 << 18
"""Most bytes that arrive at once."""
_FRAMING = 2
"""Factor by which chunked encoding may make a body larger."""


def http_config(
    gateway: Gateway, settings: ServerSettings, gate: Gate | None = None, *,
    tls: Tls | None = None, tap: TickTap | None = None, **more: Any,
) -> uvicorn.Config:  # fmt: skip
    """Return the configuration of a server for `gateway`. `gate`, `tls`, `tap`: see `create_app`;
    `more` goes to uvicorn."""
    connections = Connections(settings.connections)

    app = create_app(gateway, settings, connections, gate, tls=tls, tap=tap)

    class Bounded(HttpProtocol):
        all = connections
        shedder = app.state.shedder
        clock = ArrivalClock()
        wire_bytes_max = _FRAMING * settings.body_bytes_max + settings.connections.header_bytes

    config = uvicorn.Config(
        app, log_config=None,
        access_log=False, lifespan="on", ws="none", proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S, http=Bounded, **more,
    )  # fmt: skip
    if tls is not None:
        config.load()
        config.ssl = tls.context
    return config


class HttpProtocol(SheddingProtocol):
    """One connection."""

    all: Connections
    wire_bytes_max: int
    """Most bytes of a request: its body in chunks, and what follows it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = self.all.limits
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._phase = "idle"
        self._entered = 0
        """Phases so far."""
        self._bytes = 0
        """Bytes received in this phase."""
        self._head_bytes = 0
        self._upgrading = False
        """The request asks for another protocol, and is about to be read again."""
        self._unanswered: list[Any] = []
        """uvicorn's cycles of requests that were read and not answered, oldest first."""
        self._reading = False
        """Data that has arrived is being parsed."""
        self._over = False
        """No further bytes are read from this connection."""
        self._refused_s = -math.inf
        """When a request was last refused unparsed, by the event loop's clock."""

    # ---- coming and going -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self.all.enter():
            self._enter("idle")
        else:
            message = f"{self._limits.connections} connections are open, this server's limit"
            self._refuse(503, message, "full", linger=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._set_sending(None)
        # uvicorn notifies only the last one, which may still wait for an earlier answer.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._unanswered.clear()
        self.all.leave(self)
        super().connection_lost(exc)

    def make_way(self) -> None:
        self._close("idle_for_room")

    def _close(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self.all.note(reason, self.client)
            self.all.busy(self)
        self.transport.close()

    def _refuse(self, status: int, message: str, reason: str, *, linger: bool = True) -> None:
        """Answer and close. In the middle of another answer, only close."""
        if self._over:
            return
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and (self.pipeline or cycle.response_started):
            if self.pipeline or not cycle.response_complete:
                self._close(reason)
                return
        elif cycle is not None:
            # The task that works on the request sees a client that is gone.
            cycle.disconnected = True
            cycle.message_event.set()
        self._over = True
        self._set_timer(None)
        self.all.busy(self)
        request_id = secrets.token_hex(8)
        self.all.note(reason, self.client, request_id)
        content = msgspec.json.encode(ApiError(status, message, code=reason).body())
        head = (
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
            f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[status] + head.encode() + content)
        if linger:
            if self.transport.can_write_eof():  # not where it is encrypted
                self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    # ---- phases ---------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self._phase, self._bytes = phase, 0
        self._entered += 1
        if phase == "idle":
            self.all.idle(self)
        elif phase == "head":
            self.all.begun(self)
        else:
            self.all.busy(self)
        if not self._reading:  # a request often arrives as a whole: one timer is enough for it
            self._limit_phase()

    def _limit_phase(self) -> None:
        """Start the timer of the phase."""
        phase, limits = self._phase, self._limits
        if phase == "idle":
            self._set_timer(limits.idle_timeout_s, self._idle_over)
        elif phase == "head":
            self._set_timer(limits.head_timeout_s, partial(self._late, "headers", "head_timeout"))
        elif phase == "body":
            self._set_timer(limits.body_timeout_s, partial(self._late, "body", "body_timeout"))
        else:
            self._set_timer(None)

    def _idle_over(self) -> None:
        left_s = self._refused_s + self._limits.idle_timeout_s - self.loop.time()
        if left_s > 0.0:
            self._set_timer(left_s, self._idle_over)
        else:
            self._close("idle")

    def _late(self, what: str, reason: str) -> None:
        if self.pipeline:
            self._enter(self._phase)  # the request before it is not answered: this one is not read
            return
        limit_s = getattr(self._limits, f"{reason}_s")
        option = reason.replace("_", "-")
        message = f"the request's {what} took longer than {limit_s:g} s (--{option})"
        self._refuse(408, message, reason)

    def _set_timer(self, after_s: float | None, call: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if call is None or after_s is None else self._later(after_s, call)

    def _set_sending(
        self, after_s: float | None, call: Callable[[], None] | None = None
    ) -> None:  # fmt: skip
        if self._sending is not None:
            self._sending.cancel()
        self._sending = None if call is None or after_s is None else self._later(after_s, call)

    def _later(self, after_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(after_s, call)

    def _watch_sending(self) -> None:
        after_s = self._limits.send_timeout_s
        self._set_sending(after_s, partial(self._not_taken, self._untaken()))

    def _untaken(self) -> int:
        """Return the bytes that wait for the client, here and in the kernel. The kernel's buffer
        holds megabytes: without it, a slow client would seem to read nothing for a long time."""
        queued = array("i", [0])
        with suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    def _not_taken(self, before: int) -> None:
        """Close the connection unless the client reads. `before`: bytes that waited for it when the
        timer started."""
        if self._untaken() < before:
            self._watch_sending()  # a slow client, but it takes some
            return
        self._over = True
        self.all.note("send_timeout", self.client)
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_sending(None)

    # ---- what arrives ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        before = self._entered
        if self._phase == "idle":
            if self._refused_unparsed(data):
                self._refused_s = self.loop.time()
                self._over = self.transport.is_closing()
                self.all.idle(self)
                return
            self._piece, self._reading = data, True
            self._enter("head")
        self._reading = True
        self._feed(data)
        self._reading, self._piece, self._judged = False, b"", None
        if self._entered != before and not self._over:
            self._limit_phase()
        self._start_held()
        if self._over:
            return
        self._bytes += len(data)
        header_bytes = self._limits.header_bytes
        if self._phase == "head" and self._bytes > header_bytes:
            self._too_large()
        elif self._phase == "answer" and self._bytes > header_bytes + _READ_BYTES:
            self._close("head_too_large")  # of the next request
        elif self._phase == "body" and self._bytes > self.wire_bytes_max:
            message = f"the request takes more than {self.wire_bytes_max} bytes (--max-body-bytes)"
            self._refuse(413, message, "body_too_large")

    def _feed(self, data: bytes) -> None:
        assert self.parser is not None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_plain(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "this is not a valid HTTP request", "malformed")

    def _feed_plain(self, rest: bytes) -> None:
        """Read the request again without its wish to upgrade, as HTTP allows (RFC 9110, 7.8): the
        server has no other protocol. Java's client sends that wish with its first request."""
        self._upgrading = False
        method = self.scope["method"].encode()
        if method == b"CONNECT":
            self._refuse(405, "this server is no proxy", "malformed")
            return
        lines = [
            b"%s: %s" % field
            for field in self.headers
            if field[0] not in (b"connection", b"upgrade", b"http2-settings")
        ]
        head = [method + b" " + self.url + b" HTTP/1.1", *lines, b"connection: close", b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"\r\n".join(head) + rest)

    def _too_large(self) -> None:
        limits = self._limits
        message = (
            f"the request's headers are more than {limits.headers} or larger than "
            f"{limits.header_bytes} bytes (--max-headers, --max-header-bytes)"
        )
        self._refuse(431, message, "head_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also called for the trailers of a chunked body, which are ignored.
        if self._phase != "body":
            self._head_bytes += len(name) + len(value) + 4
            if len(self.headers) <= self._limits.headers:
                super().on_header(name, value)

    def on_headers_complete(self) -> None:
        limits = self._limits
        if self._over:
            return
        if self._head_bytes > limits.header_bytes or len(self.headers) > limits.headers:
            self._too_large()
            return
        assert self.parser is not None
        if self.parser.should_upgrade():
            self._upgrading = True
            self.scope["method"] = self.parser.get_method().decode()
            return
        self._enter("body")
        super().on_headers_complete()
        unanswered = [one for one in self._unanswered if not one.response_complete]
        self._unanswered = [*unanswered, self.cycle]

    def on_body(self, body: bytes) -> None:
        if not (self._over or self._upgrading):
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._over or self._upgrading:
            return
        state: dict[str, Any] = self.scope["state"]  # pyright: ignore
        state["arrived_s"], state["read_s"] = self._arrived_s(), time.monotonic()
        super().on_message_complete()
        # Bytes behind a connection's last request are not read.
        self._over = not self.cycle.keep_alive
        if self._over:
            self._set_timer(None)
        self._enter("idle" if self.cycle.response_complete else "answer")
        self._shed()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = unchunked(cycle, app)
        if self._reading and self._phase == "body":
            self._held = cycle, app
        else:
            super()._start_asgi_task(cycle, app)  # it waited for the answers before

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the idle time is counted here
        answered = self._phase == "answer" and self.cycle.response_complete
        if answered and not self.transport.is_closing():
            self._enter("idle")
