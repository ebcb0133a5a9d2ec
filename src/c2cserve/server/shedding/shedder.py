"""Refuses requests in an overload before the application sees them."""

import logging
import random
import re
import time
from collections.abc import Mapping, MutableMapping, Sequence
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
from c2cserve.server.shedding.heads import Caller, KnownHeads, first_fields

log = logging.getLogger(__name__)

LET_IN = b""
"""Instead of a refusal: the request may come in."""
_ID = re.compile(r"[!-~]{1,128}")
"""Request ids of clients that are used: they are safe in a header and on a line of a log."""
_encode = msgspec.json.Encoder().encode
_ids = random.Random()
"""Ids need not be secret, so the operating system is not asked for each. They do not count
requests: a client shall not learn how many others send."""


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that the client gave its request, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else f"{_ids.getrandbits(64):016x}"


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
        self.heads = KnownHeads()
        self._common: tuple[Sequence[tuple[bytes, bytes]], bytes] = ((), b"")

    @property
    def active(self) -> bool:
        """Whether any request may be refused now."""
        return self._gateway.may_refuse

    def caller(self, scope: MutableMapping[str, Any], *, closes: bool) -> Caller | None:
        """Return what the head of a request says. None if it asks for something else, or has a
        fault: then it comes in, and is told there. `closes`: its connection ends with it."""
        route = scope["path"]
        if scope["method"] != "POST" or route not in ANSWER_PATHS:
            return None
        http = HttpRequest(scope)
        try:
            self._guard.check(http, "user")
        except ApiError:
            return None
        fields: Sequence[tuple[bytes, bytes]] = scope["headers"]
        more = self._guard.cross_origin(http, "user")
        return Caller(route, first_fields(fields), more, closes)

    def judge(
        self, caller: Caller, body: bytes, arrived_s: float, given_id: str | None = None
    ) -> bytes | None:
        """Return the fields and the content of a refusal. `LET_IN` if the request can be in time,
        None if the application is to look at it. Only an overload is refused here: a request with
        a fault comes in, and is told there. `given_id`: what the client calls this request, where
        that is not as in `caller`."""
        route, headers = caller.route, caller.headers
        try:
            key = self._gate.identify(key_header(headers))
            name = model_of(body)
            if route.startswith("/api/"):
                name = catalogue_name(name, self._gateway)
            files = self._gateway.resolve(name)
            if files is None or not key.quota.limits.allows_model(files.id):
                return None
            self._preparer.check_overload(files, key.tenant, headers, arrived_s)
            self._preparer.let_in(key.tenant)
        except Refused as refused:
            if refused.status != 429:
                return None
            return self._answer(caller, ApiError.of(refused), given_id)
        except ApiError:
            return None
        return LET_IN

    def common(self, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the lines of the header fields that all answers have. They change once a
        second."""
        if fields is not self._common[0]:
            lines = b"".join(b"%s: %s\r\n" % field for field in fields)
            self._common = fields, lines
        return self._common[1]

    def _answer(self, caller: Caller, error: ApiError, given_id: str | None) -> bytes:
        headers = caller.headers if given_id is None else {"x-request-id": given_id}
        route, id_ = caller.route, request_id(headers)
        self._metrics.responded(route, error.status)
        self._log(route, error, id_)
        content = _encode(error_body(route, error))
        fields = {**id_headers(route, id_), **error.all_headers(), **caller.more}
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        return (
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n{lines}\r\n"
        ).encode("latin-1") + content

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
