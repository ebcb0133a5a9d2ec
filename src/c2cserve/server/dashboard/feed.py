"""The stream of states: server-sent events, as the state changes and no faster than its bound."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import msgspec

from c2cserve.server.dashboard.state import DashboardState

log = logging.getLogger(__name__)

PERIOD_S = 0.5
"""The least time between two states of a stream."""
KEEPALIVE_S = 10.0
"""A stream without changes sends a comment so often, so that proxies know that it lives."""
VIEWERS_MAX = 16


_RETRY = b"retry: 2000\n\n"
"""A page connects again after so many milliseconds."""
ALIVE = b": alive\n\n"


def event(state: DashboardState) -> bytes:
    """Return a state as a server-sent event."""
    return b"event: state\ndata: " + msgspec.json.encode(state) + b"\n\n"


class Feed:
    """Samples a state while there are viewers, once for all of them, and hands it to each.

    A viewer that reads slowly misses states in between and always gets the newest one. Without
    viewers nothing is sampled. All methods are called on the event loop."""

    def __init__(
        self, sample: Callable[[], DashboardState | None], period_s: float = PERIOD_S,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:  # fmt: skip
        """`sample` returns None when there will be no further state: then all streams end."""
        self._sample = sample
        self._period_s = period_s
        self._keepalive_s = keepalive_s
        self._shown: DashboardState | None = None
        self._latest = b""
        self._number = 0
        """The number of the newest state."""
        self._ends = 0
        """How often all streams were ended."""
        self._changed = asyncio.Condition()
        self._sampling: asyncio.Task[None] | None = None
        self.viewers = 0

    @property
    def full(self) -> bool:
        return self.viewers >= VIEWERS_MAX

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the state at once, and again after each change, until streams end."""
        self.viewers += 1
        try:
            ends = self._ends
            if not self._refresh():
                return
            if self._sampling is None:
                self._sampling = asyncio.create_task(self._run())
            yield _RETRY
            number = -1
            while self._ends == ends:
                if number != self._number:
                    number = self._number
                    yield self._latest
                elif not await self._change(number, ends):
                    yield ALIVE
        finally:
            self.viewers -= 1
            if not self.viewers and self._sampling is not None:
                self._sampling.cancel()
                self._sampling = None

    async def _change(self, number: int, ends: int) -> bool:
        """Wait for another state, or for the end. Return False if neither comes for long."""
        try:
            async with asyncio.timeout(self._keepalive_s), self._changed:
                await self._changed.wait_for(lambda: (self._number, self._ends) != (number, ends))
        except TimeoutError:
            return False
        return True

    def _refresh(self) -> bool:
        """Take a sample. Its number rises if more than the time has changed. Return False at the
        end."""
        state = self._sample()
        if state is None:
            return False
        if self._shown is None or replace(self._shown, now_s=state.now_s) != state:
            self._shown, self._latest = state, event(state)
            self._number += 1
        return True

    async def _run(self) -> None:
        try:
            going = True
            while going:
                await asyncio.sleep(self._period_s)
                number = self._number
                going = self._refresh()
                if number != self._number:
                    await self._notify()
        except Exception:
            # Pages connect again after the end of their stream: then the next sample is tried.
            log.exception("the dashboard's state cannot be made")
        self._sampling = None
        self._ends += 1
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
