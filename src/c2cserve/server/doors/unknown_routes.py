"""The answer to a path or method that the server does not have."""

from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.routing import Match, Route

from c2cserve.server.errors import ApiError

_SHOWN_CHARS = 200


def unknown_route(http: HttpRequest, error: HTTPException) -> ApiError:
    """Return the error for a request that the router has refused, with what was asked for."""
    asked = f"{http.method} {_shown_path(http)}"
    match error.status_code:
        case 404:
            return no_such_path(http)
        case 405:
            allowed = _methods(http)
            return ApiError(405, f"{asked}: this path takes {allowed}", headers={"allow": allowed})
        case _:
            message = f"{asked}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers)


def no_such_path(http: HttpRequest) -> ApiError:
    """Return the error for a path that leads nowhere. It names the path that was probably meant:
    clients are given a server's address without its `/v1`, or with one too many."""
    message = f"there is no {http.method} {_shown_path(http)} here"
    near = _nearest(http)
    message += f"; did you mean {near}?" if near else "; /docs lists what there is"
    return ApiError(404, message, code="unknown_url")


def _methods(http: HttpRequest) -> str:
    """Return the methods of the path. Each is a route of its own, and the router names the first
    one's."""
    found = set[str]()
    for route in http.app.routes:
        if isinstance(route, Route) and route.matches(http.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


def _shown_path(http: HttpRequest) -> str:
    return quote(http.scope["path"])[:_SHOWN_CHARS]


def _nearest(http: HttpRequest) -> str | None:
    asked = "".join(f"/{part}" for part in http.scope["path"].split("/") if part)
    if not asked:
        return None
    for route in http.app.routes:
        if not isinstance(route, Route) or http.method not in (route.methods or ()):
            continue
        path = route.path
        if len(path) > 1 and "{" not in path and (path.endswith(asked) or asked.endswith(path)):
            return path
    return None
