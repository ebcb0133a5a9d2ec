"""The dashboard's routes: its page and the files of it, and the stream of states."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from c2cserve.server.dashboard.feed import Feed
from c2cserve.server.disconnect import EventStream
from c2cserve.server.errors import ApiError
from c2cserve.server.pages.static import StaticPage

Handler = Callable[[HttpRequest], Awaitable[Response]]

PAGE = StaticPage(
    Path(__file__).parent / "page",
    "index.html", "dashboard.css", "main.js", "panels.js", "timeline.js", "format.js",
)  # fmt: skip
_OWN_SITE = ("same-origin", "none")


def check_site(http: HttpRequest) -> None:
    """Check that a stream is not opened by a web page of another site, which could hold all places
    of viewers without reading a byte. Raises ApiError (403)."""
    if http.headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        raise ApiError(
            403, "web pages of other origins may not watch this server", code="origin_not_allowed"
        )


class FeedStream(EventStream):
    """A stream that is closed with its connection, so that its place is free at once."""

    def __init__(self, events: AsyncGenerator[bytes, None], **more: Any) -> None:
        super().__init__(events, **more)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def stream(feed: Feed) -> Response:
    """Answer with a feed's events. Raises ApiError (429) when it has all the viewers it may."""
    if feed.full:
        raise ApiError(429, "too many pages watch this dashboard", retry_after_s=5.0)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return FeedStream(feed.events(), headers=headers, media_type="text/event-stream")


class DashboardRoutes:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def table(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each route."""
        return [
            ("GET", "/dashboard", self._page),
            ("GET", "/dashboard/events", self._events),
            ("GET", "/dashboard/{name}", self._file),
        ]

    async def _page(self, _: HttpRequest) -> Response:
        return PAGE.file("index.html")

    async def _file(self, http: HttpRequest) -> Response:
        return PAGE.file(http.path_params["name"])

    async def _events(self, http: HttpRequest) -> Response:
        check_site(http)
        return stream(self._feed)
