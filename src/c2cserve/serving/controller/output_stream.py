"""The output of requests on its way from the controller to their clients."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from math import inf

from c2cserve.core.request import Delta, FinishReason
from c2cserve.runtime.gateway import Refused


class OutputStream:
    """The output of a request's choices on its way to the event loop.

    What its client has not taken yet of a choice is one delta, however many steps it is of. So a
    busy event loop has less to do for each token, the later it is."""

    __slots__ = ("_items", "_pace_s", "_taken", "_timer", "_waiter", "_woken_s")

    def __init__(self, pace_s: float = 0.0) -> None:
        """`pace_s`: how often the client gets more at most, where `put` says so."""
        self._items: dict[str, list[Delta | Refused]] = {}
        """Choice -> its items. The one whose output has waited longest comes first."""
        self._taken = 0
        """Items that were taken without a pause."""
        self._waiter: asyncio.Future[None] | None = None
        self._pace_s = pace_s
        self._woken_s = -inf
        """When the client was last given something that it waited for."""
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Delta | Refused, *, paced: bool = False) -> None:
        """Add an item. `paced`: the client may have to wait for more tokens, but never for its
        first one, nor for the end. Called on the event loop."""
        goes_on = False
        waiting = self._items.setdefault("" if isinstance(item, Refused) else item.request_id, [])
        if isinstance(item, Delta) and _continues(item):
            goes_on = item.finish is None
            if waiting and isinstance(last := waiting[-1], Delta):
                item = _joined(last, item)
                waiting.pop()
        waiting.append(item)
        if self._waiter is None or self._waiter.done():
            return
        if paced and goes_on:
            left_s = self._woken_s + self._pace_s - time.monotonic()
            if left_s > 0.0:
                if self._timer is None:
                    self._timer = self._waiter.get_loop().call_later(left_s, self._wake)
                return
        self._wake()

    def _wake(self) -> None:
        self._woken_s = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Delta | Refused:
        """Return what has waited longest. After each few items, others get a turn of the loop."""
        self._taken = 0 if not self._items else self._taken + 1
        if self._taken > FairDelivery.PORTION:
            self._taken = 0
            await asyncio.sleep(0)
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        choice = next(iter(self._items))
        item, *more = self._items.pop(choice)
        if more:
            self._items[choice] = more
        return item


def _continues(delta: Delta) -> bool:
    """Return whether a delta may be told together with the one before it. An error may not: a
    client gets the tokens before it first. What stops with a token must have it."""
    if delta.timing is not None or delta.finish is FinishReason.ERROR:
        return False
    return delta.finish is not FinishReason.STOP or bool(delta.tokens)


def _joined(first: Delta, then: Delta) -> Delta:
    return Delta(
        first.request_id, first.tokens + then.tokens, first.logprobs + then.logprobs,
        first.prompt_logprobs, then.finish, first.cached_tokens, first.timing,
    )  # fmt: skip


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
        self.paced = False
        """Whether slow clients get several tokens at a time: in an overload."""
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
            stream.put(item, paced=self.paced)
            items.popleft()
            del self._due[tenant]
            if items:
                self._due[tenant] = items  # behind the others
