"""The output of requests on its way from the controller to their clients."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from c2cserve.core.request import Delta
from c2cserve.runtime.gateway import Refused


class OutputStream:
    """One request's output on its way to the event loop."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Delta | Refused] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Delta | Refused) -> None:
        """Add an item. Called on the event loop."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Delta | Refused:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


Output = tuple[str, OutputStream, Delta | Refused]
"""A tenant, one of its requests, and what that gets."""


class FairDelivery:
    """Hands items to their requests: tenants in turn, and some at a time.

    A step of 128 requests has 128 items, and each wakes a task. If all were handed out at once, the
    turns of the loop would take that long, and a request of another tenant takes several turns. But
    a busy loop has few turns in a second. So what has waited long is handed out at once: a backlog
    would make every answer late."""

    PORTION = 32
    """Items in a turn of the loop,"""
    DELAY_S = 0.005
    """and those that have waited so long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[str, deque[tuple[float, OutputStream, Delta | Refused]]] = {}
        """Tenant -> its items, oldest first. The tenant whose turn it is comes first."""
        self._scheduled = False
        self.delay_s = 0.0
        """How long an item took lately from the controller to its request."""

    def add(self, items: Iterable[Output], since_s: float) -> None:
        """Hand items out, in the order of each request. `since_s`: when the controller sent them,
        as `time.monotonic` counts. Called on the event loop."""
        for tenant, stream, item in items:
            self._due.setdefault(tenant, deque()).append((since_s, stream, item))
        if not self._scheduled:
            self._deliver()

    def _deliver(self) -> None:
        self._scheduled = False
        now, number = time.monotonic(), 0
        while self._due:
            tenant, items = next(iter(self._due.items()))
            since_s, stream, item = items[0]
            waited_s = now - since_s
            if number >= self.PORTION and waited_s < self.DELAY_S:
                self._scheduled = True
                self._loop.call_soon(self._deliver)
                return
            if number == 0:
                self.delay_s = waited_s
            number += 1
            stream.put(item)
            items.popleft()
            del self._due[tenant]
            if items:
                self._due[tenant] = items  # behind the others
