"""Checks of every request before its key: its host, origin, peer and media type.

| check | against |
|---|---|
| `Host` names this machine, or a host that was allowed | DNS rebinding: a web page whose name |
| | is made to lead to this machine |
| `Origin` of requests that change something is the server's own, or allowed | web pages of others |
| without an admin key, `/admin`, `/dashboard` and `/metrics` have local peers only | other |
| | machines |
| a body is `application/json` | forms and scripts of web pages, which send no such type unasked. |
| | Ollama's clients do not say it; without signs of a browser they need not |
| a body is not compressed | JSON that would be found broken without a word about why |

Browsers always send `Host`, and `Origin` unless they only read. Other clients gain nothing by
forging them.
"""

import ipaddress
import re
from functools import lru_cache
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from c2cserve.server.errors import ApiError
from c2cserve.server.settings import AccessSettings

Role = Literal["user", "admin", "metrics", "dashboard", ""]
"""The kind of key that a route asks for. `metrics` asks for the administrator's unless it is open.
`dashboard` asks for it in a way that browsers know too."""

_ADMINISTRATION: tuple[Role, ...] = ("admin", "metrics", "dashboard")
ANY = "*"
_JSON = "application/json"
_READING = ("GET", "HEAD", "OPTIONS")
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Fields with which a proxy says that its own address is not the client's."""
_FETCHED = "sec-fetch-"
"""Begins the fields in which browsers say how a request came about."""
_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{1,4096}")
_PREFLIGHT_S = 600


class Guard:
    """The checks of one server. They raise ApiError, whose message says how to allow the
    request."""

    def __init__(self, access: AccessSettings, *, admin_key: bool) -> None:
        """`admin_key`: the server has one, which identifies the administrator."""
        self._access = access
        self._admin_key = admin_key

    def asks_for_key(self, role: Role) -> bool:
        """Return whether a route asks for the administrator's key."""
        return role in _ADMINISTRATION and self._admin_key and not self._open(role)

    def check(self, http: HttpRequest, role: Role) -> None:
        headers = http.headers
        local_only = role in _ADMINISTRATION and not (self._admin_key or self._open(role))
        if local_only:
            self._check_local(http, role)
        checks_hosts = self._access.loopback_only or bool(self._access.allowed_hosts)
        if local_only or (role and checks_hosts):  # probes of /health ask by address
            self._check_host(headers)
        if http.method not in _READING:
            self._check_origin(headers, role)
            _check_media_type(headers, free=_is_ollamas(http))

    def _open(self, role: Role) -> bool:
        return role == "metrics" and self._access.open_metrics

    # ---- hosts ----------------------------------------------------------------------------------

    def _check_host(self, headers: Headers) -> None:
        allowed = self._access.allowed_hosts
        for host in headers.getlist("host"):
            name = host_name(host)
            if not (is_loopback(name) or name in allowed or ANY in allowed):
                raise ApiError(
                    403, f"the host {host[:200]!r} is not one of this server's: ask for localhost, "
                    "or start the server with --allowed-host", param="host",
                    code="host_not_allowed",
                )  # fmt: skip

    # ---- origins --------------------------------------------------------------------------------

    def _check_origin(self, headers: Headers, role: Role) -> None:
        for origin in headers.getlist("origin"):
            place = origin.lower().partition("://")[2]
            own = place == headers.get("host", "").lower()
            if not ((place and own) or (role in ("user", "") and self._allowed(origin))):
                raise ApiError(
                    403, f"web pages of the origin {origin[:200]!r} may not use this server: "
                    "--allowed-origin allows an origin to use /v1 and /api", param="origin",
                    code="origin_not_allowed",
                )  # fmt: skip

    def _allowed(self, origin: str) -> bool:
        allowed = self._access.allowed_origins
        return ANY in allowed or origin.lower() in allowed

    def cross_origin(self, http: HttpRequest, role: Role) -> dict[str, str]:
        """Return the header fields that let a web page of an allowed origin read an answer of /v1
        (CORS); none for other requests. They do not allow a browser's stored credentials."""
        origin = http.headers.get("origin")
        if role != "user" or not self._access.allowed_origins:
            return {}
        if origin is None or not self._allowed(origin):
            return {"vary": "origin"}
        return {
            "vary": "origin", "access-control-allow-origin": origin,
            "access-control-expose-headers": "*",
        }  # fmt: skip

    def preflight(self, http: HttpRequest) -> dict[str, str]:
        """Return the header fields that answer a browser's preflight request for /v1. Raises
        ApiError (403)."""
        fields = self.cross_origin(http, "user")
        asked = http.headers.get("access-control-request-headers", "")
        if "access-control-allow-origin" not in fields:
            origin = http.headers.get("origin", "")
            raise ApiError(
                403, f"web pages of the origin {origin[:200]!r} may not use this server "
                "(--allowed-origin)", param="origin", code="origin_not_allowed",
            )  # fmt: skip
        if _FIELD_NAMES.fullmatch(asked):
            fields["access-control-allow-headers"] = asked
        return fields | {
            "access-control-allow-methods": "GET, POST",
            "access-control-max-age": str(_PREFLIGHT_S),
        }

    # ---- peers ----------------------------------------------------------------------------------

    def _check_local(self, http: HttpRequest, role: Role) -> None:
        """Check that a request comes from this machine. A proxy here is a local peer with clients
        elsewhere. The fields that proxies add reveal it; a server behind a proxy that adds none
        needs an admin key (docs/security.md). Raises ApiError (403)."""
        peer = "" if http.client is None else http.client.host
        if is_loopback(peer) and not any(name in http.headers for name in _FORWARDED):
            return
        more = ", or open it with --open-metrics" if role == "metrics" else ""
        raise ApiError(
            403, f"/{role} is for this machine only while the server has no admin key: start it "
            f"with --admin-key-file or C2CSERVE_ADMIN_KEY{more}", code="local_only",
        )  # fmt: skip


def _is_ollamas(http: HttpRequest) -> bool:
    """Return whether a request is for Ollama's API, and no web page can have sent it. Browsers name
    a page's origin, and say how a request came about."""
    if not http.scope["path"].startswith("/api/"):
        return False
    return "origin" not in http.headers and not any(
        name.startswith(_FETCHED) for name in http.headers
    )


def _check_media_type(headers: Headers, *, free: bool) -> None:
    """Check that a body is declared as JSON, unless that is `free`. A request without a body needs
    no type. Raises ApiError (415)."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    _check_plain(headers)
    given = [] if free else headers.getlist("content-type") or [""]
    for one in given:
        if one.partition(";")[0].strip().lower() == _JSON:
            continue
        shown = f"not {one[:200]!r}" if one else "which is missing"
        raise ApiError(
            415, f"the body must be JSON, and say so: send the header 'content-type: {_JSON}', "
            f"{shown} (curl: -H 'content-type: {_JSON}')", param="content-type",
            code="unsupported_media_type",
        )  # fmt: skip


def _check_plain(headers: Headers) -> None:
    """Check that a body is sent as it is, not compressed. Raises ApiError (415)."""
    for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        for one in headers.getlist(name):
            if one.strip().lower() not in ("", plain):
                raise ApiError(
                    415, f"the body is encoded ({name}: {one[:200]!r}): this server reads only "
                    "plain ones", param=name, code="unsupported_media_type",
                )  # fmt: skip


def host_name(host: str) -> str:
    """Return the name or address of a `Host` field, without its port and in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if name.count(":") == 1 else name


@lru_cache(256)
def is_loopback(name: str) -> bool:
    """Return whether a name or an address is this machine's own. In browsers, names below
    `localhost` never lead elsewhere (RFC 6761)."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
