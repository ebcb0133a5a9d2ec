"""One request's output on its way to its client."""

import asyncio
from collections import deque

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
