"""`/docs`: a page that shows the API's description (`/openapi.json`)."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from c2cserve.server.pages.static import StaticPage

DOCS = StaticPage(Path(__file__).parent / "docs_page", "index.html", "docs.css", "docs.js")


async def _page(_: HttpRequest) -> Response:
    return DOCS.file("index.html")


async def _file(http: HttpRequest) -> Response:
    return DOCS.file(http.path_params["name"])


DOCS_ROUTES: tuple[tuple[str, str, Callable[[HttpRequest], Awaitable[Response]]], ...] = (
    ("GET", "/docs", _page),
    ("GET", "/docs/{name}", _file),
)
"""Method, path and handler of each route."""
