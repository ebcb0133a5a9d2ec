"""What happens to a request before the application sees it: when it arrived, and whether it is
refused at once.

A busy event loop reads late. What waits unread is invisible to it, so a time to first token that
counts from the first line of code is too short. The kernel knows when the bytes came.
"""

import asyncio
import logging
import re
import secrets
import socket
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from c2cserve.core.log_limit import LogLimit
from c2cserve.runtime.gateway import Gateway, Refused
from c2cserve.server.access.gate import Gate
from c2cserve.server.access.keyring import key_header
from c2cserve.server.doors.ollama.models import catalogue_name
from c2cserve.server.doors.routes import ANSWER_PATHS, error_body, id_headers
from c2cserve.server.errors import ApiError
from c2cserve.server.guard import Guard
from c2cserve.server.metrics import Metrics
from c2cserve.server.prepare import Preparer, model_of

log = logging.getLogger(__name__)

_ID = re.compile(r"[!-~]{1,128}")
"""Request ids of clients that are used: they are safe in a header and on a line of a log."""
_LAST_DATA_AT = 52
"""Offset of `tcpi_last_data_recv` in Linux' `struct tcp_info`: milliseconds since data arrived."""
_TICK_S = 0.01
"""The kernel counts in ticks of up to so long. A shorter wait cannot be told from none."""


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that the client gave its request, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(8)


def arrived_s(transport: asyncio.BaseTransport) -> float:
    """Return when the last bytes of a connection arrived, as `time.monotonic` counts. It is now
    for what is no TCP connection."""
    now, connection = time.monotonic(), transport.get_extra_info("socket")
    if connection is None:
        return now
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_AT + 4)
    except OSError:
        return now
    unread_s = int.from_bytes(info[_LAST_DATA_AT:], "little") / 1e3
    return now if unread_s <= _TICK_S else now - unread_s


class LoadShedder:
    """Refuses requests in an overload before anything is made of them: no task, no route, no text
    process. So refusing takes little of the processor time that answers need."""

    def __init__(
        self, gateway: Gateway, guard: Guard, gate: Gate, metrics: Metrics, preparer: Preparer
    ) -> None:
        self._gateway = gateway
        self._guard = guard
        self._gate = gate
        self._metrics = metrics
        self._preparer = preparer
        self._log_limit = LogLimit()

    def refusal(self, scope: MutableMapping[str, Any], body: bytes) -> bytes | None:
        """Return the fields and the content of a refusal, None if the request may come in. Only an
        overload is refused here: a request with a fault comes in, and is told there."""
        route = scope["path"]
        if not self._gateway.may_refuse or scope["method"] != "POST" or route not in ANSWER_PATHS:
            return None
        http = HttpRequest(scope)
        try:
            self._guard.check(http, "user")
            key = self._gate.identify(key_header(http.headers))
            name = model_of(body)
            if route.startswith("/api/"):
                name = catalogue_name(name, self._gateway)
            files = self._gateway.resolve(name)
            if files is None or not key.quota.limits.allows_model(files.id):
                return None
            state = scope["state"]
            self._preparer.check_overload(files, key.tenant, http.headers, state["arrived_s"])
            self._preparer.let_in(key.tenant)
            state["let_in"] = True
        except Refused as refused:
            if refused.status != 429:
                return None
            fields = self._guard.cross_origin(http, "user")
            return self._answer(route, ApiError.of(refused), request_id(http.headers), fields)
        except ApiError:
            return None
        return None

    def _answer(
        self, route: str, error: ApiError, request_id: str, more: Mapping[str, str]
    ) -> bytes:
        self._metrics.responded(route, error.status)
        self._log(route, error, request_id)
        content = msgspec.json.encode(error_body(route, error))
        fields = {
            "content-type": "application/json", "content-length": str(len(content)),
            **id_headers(route, request_id), **error.all_headers(), **more,
        }  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{lines}\r\n".encode("latin-1") + content

    def _log(self, route: str, error: ApiError, request_id: str) -> None:
        """Log at most one refusal per second: writing a line takes longer than refusing."""
        if (more := self._log_limit.more(time.monotonic())) is None:
            return
        log.info(
            "%s answered %d: %s%s", route, error.status, error.message, more,
            extra={
                "request_id": request_id, "route": route, "status": error.status,
                "code": error.code,
            },
        )  # fmt: skip
