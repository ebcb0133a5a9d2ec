"""A record played on the dashboard: the same page and the same states, from a file."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from c2cserve.runtime.replay import RecordError, RecordLines
from c2cserve.runtime.wire import WireError
from c2cserve.server.dashboard.feed import ALIVE, KEEPALIVE_S, PERIOD_S, event
from c2cserve.server.dashboard.record_fold import RecordFold
from c2cserve.server.dashboard.routes import PAGE, FeedStream, Handler, check_site
from c2cserve.server.dashboard.state import DashboardState, Playback
from c2cserve.server.errors import ApiError
from c2cserve.server.guard import Guard
from c2cserve.server.settings import AccessSettings

VIEWERS_MAX = 4
"""Each viewer reads the file for itself."""
_CHUNK_LINES = 2000
"""Lines that are applied between two looks at other work."""
_SPEED_MAX = 1e4


@dataclass(frozen=True, slots=True)
class Span:
    """The times of a record's first and last tick, seconds."""

    begin_s: float
    end_s: float


def find_span(path: Path) -> Span:
    """Read a record once. Raises RecordError when it is none or has no tick, and OSError."""
    fold, begin_s, ticks = RecordFold(path.name), 0.0, 0
    for number, line in RecordLines(path):
        _add(fold, path, number, line)
        if "policy" not in line:
            begin_s = line["now"] if not ticks else min(begin_s, line["now"])
            ticks += 1
    if not ticks:
        raise RecordError(f"{path}: not a record (it has no tick)")
    return Span(begin_s, fold.now_s)


def _add(fold: RecordFold, path: Path, number: int, line: dict[str, Any]) -> None:
    try:
        fold.add(line)
    except (KeyError, TypeError, WireError, msgspec.ValidationError) as error:
        raise RecordError(f"{path}:{number}: not a line of a record: {error!r}") from error


class Player:
    """Plays a record for one viewer."""

    def __init__(self, path: Path, span: Span, at_s: float, speed: float) -> None:
        self._path = path
        self._span = span
        self._speed = speed
        self._fold = RecordFold(path.name)
        self._lines: Iterator[tuple[int, dict[str, Any]]] = iter(RecordLines(path))
        self._next: tuple[int, dict[str, Any]] | None = next(self._lines, None)
        self._at_s = min(max(at_s, span.begin_s), span.end_s)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield states from `at_s` on, until the record ends."""
        began_s, from_s = time.monotonic(), self._at_s
        while True:
            while not await asyncio.to_thread(self._advance, self._at_s):
                yield ALIVE  # a long way to go: the connection lives
            state = self._state()
            yield event(state)
            if state.playback is None or state.playback.over:
                return
            await asyncio.sleep(PERIOD_S if self._speed else KEEPALIVE_S)
            passed_s = (time.monotonic() - began_s) * self._speed
            self._at_s = min(from_s + passed_s, self._span.end_s)

    def _advance(self, until_s: float) -> bool:
        """Apply lines up to a time. Return False if there may be more of them."""
        for _ in range(_CHUNK_LINES):
            if self._next is None:
                return True
            number, line = self._next
            if line.get("now", until_s) > until_s:
                return True
            _add(self._fold, self._path, number, line)
            self._next = next(self._lines, None)
        return False

    def _state(self) -> DashboardState:
        over = self._at_s >= self._span.end_s
        span = self._span
        playback = Playback(
            begin_s=span.begin_s, end_s=span.end_s, speed=self._speed, over=over
        )  # fmt: skip
        return self._fold.state(playback, self._at_s)


class ReplayRoutes:
    """The dashboard's routes over a record, for processes of this machine."""

    def __init__(self, path: Path, span: Span) -> None:
        self._path = path
        self._span = span
        self._guard = Guard(AccessSettings(), admin_key=False)
        self._viewers = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/dashboard", self._guarded(self._page)),
                Route("/dashboard/events", self._guarded(self._events)),
                Route("/dashboard/{name}", self._guarded(self._file)),
            ]
        )

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(http: HttpRequest) -> Response:
            try:
                self._guard.check(http, "dashboard")
                return await handler(http)
            except ApiError as error:
                return error.response(error.body())

        return guarded

    async def _page(self, _: HttpRequest) -> Response:
        return PAGE.file("index.html")

    async def _file(self, http: HttpRequest) -> Response:
        return PAGE.file(http.path_params["name"])

    async def _events(self, http: HttpRequest) -> Response:
        check_site(http)
        if self._viewers >= VIEWERS_MAX:
            raise ApiError(429, "too many pages watch this replay", retry_after_s=5.0)
        at_s, speed = _number(http, "at", self._span.begin_s), _number(http, "speed", 1.0)
        if not 0.0 <= speed <= _SPEED_MAX:
            raise ApiError(400, f"speed: 0 to {_SPEED_MAX:g}", param="speed")
        player = Player(self._path, self._span, at_s, speed)
        headers = {"cache-control": "no-cache"}
        return FeedStream(self._counted(player), headers=headers, media_type="text/event-stream")

    async def _counted(self, player: Player) -> AsyncGenerator[bytes, None]:
        self._viewers += 1
        try:
            async for one in player.events():
                yield one
        finally:
            self._viewers -= 1


def _number(http: HttpRequest, name: str, otherwise: float) -> float:
    """Return a finite number of the query. Raises ApiError (400)."""
    given = http.query_params.get(name)
    if given is None:
        return otherwise
    try:
        found = float(given)
    except ValueError:
        found = float("nan")
    if not abs(found) < float("inf"):
        raise ApiError(400, f"{name}: a number was expected, not {given[:80]!r}", param=name)
    return found
