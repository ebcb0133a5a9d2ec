"""The output of requests on its way from the controller to their clients."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from math import inf

from c2cserve.core.request import Delta, FinishReason
from c2cserve.runtime.gateway import Refused


class OutputStream:
    """The output of a request's choices on its way to the event loop.

    What its client has not taken yet of a choice is one delta, however many steps it is of. So a
    busy event loop has less to do for each token, the later it is. While a client has to wait for
    more, its tokens take none of the event loop's time."""

    __slots__ = (
        "_arrived", "_items", "_notified", "_pace_s", "_taken", "_timer", "_waiter", "_woken_s"
    )  # fmt: skip

    def __init__(self, pace_s: float = 0.0) -> None:
        """`pace_s`: how often the client gets more at most, where `deliver` says so."""
        self._arrived: deque[Delta | Refused] = deque()
        """What the controller has added and `_items` has not. Both threads use it."""
        self._notified = False
        """The event loop will look at `_arrived` anyway."""
        self._items: dict[str, list[Refused | list[Delta]]] = {}
        """Choice -> its items, runs of deltas that can be told together. The choice whose output
        has waited longest comes first."""
        self._taken = 0
        """Items that were taken without a pause."""
        self._waiter: asyncio.Future[None] | None = None
        self._pace_s = pace_s
        self._woken_s = -inf
        """When the client was last given something that it waited for."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Delta | Refused) -> bool:
        """Add an item, and return whether `deliver` must be called for it. Called by the
        controller's thread. `deliver` clears `_notified` before it looks, so whatever is added
        without a call is seen by the one that is due."""
        self._arrived.append(item)
        if self._notified and _goes_on(item):
            return False
        self._notified = True
        return True

    def put(self, item: Delta | Refused) -> None:
        """Add an item and give it to the client at once. Called on the event loop, where all that
        is added comes from there."""
        if self.add(item):
            self.deliver()

    def deliver(self, *, paced: bool = False) -> None:
        """Give the client what was added. `paced`: it may have to wait for more tokens, but never
        for its first one, nor for the end. Called on the event loop."""
        self._notified = False
        urgent = self._take_in()
        if not self._items or self._waiter is None or self._waiter.done():
            return
        left_s = self._woken_s + self._pace_s - time.monotonic()
        if urgent or not paced or left_s <= 0.0:
            self._wake()
            return
        self._notified = True  # the timer looks
        if self._timer is None:
            self._timer = self._waiter.get_loop().call_later(left_s, self._due)

    def _take_in(self) -> bool:
        """Put what was added behind the items of its choice. Return whether any of it may not
        wait."""
        urgent, arrived = False, self._arrived
        while arrived:
            item = arrived.popleft()
            urgent = urgent or not _goes_on(item)
            if isinstance(item, Refused):
                self._items.setdefault("", []).append(item)
                continue
            runs = self._items.setdefault(item.request_id, [])
            if runs and _continues(item) and isinstance(last := runs[-1], list):
                last.append(item)
            else:
                runs.append([item])
        return urgent

    def _due(self) -> None:
        self._timer = None
        self._notified = False
        self._take_in()
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
        return item if isinstance(item, Refused) else _joined(item)


def _goes_on(item: Delta | Refused) -> bool:
    """Return whether an item only adds tokens to those before it."""
    return isinstance(item, Delta) and item.finish is None and item.timing is None


def _continues(delta: Delta) -> bool:
    """Return whether a delta may be told together with the one before it. An error may not: a
    client gets the tokens before it first. What stops with a token must have it."""
    if delta.timing is not None or delta.finish is FinishReason.ERROR:
        return False
    return delta.finish is not FinishReason.STOP or bool(delta.tokens)


def _joined(run: Sequence[Delta]) -> Delta:
    first = run[0]
    if len(run) == 1:
        return first
    return Delta(
        first.request_id, tuple(chain.from_iterable([one.tokens for one in run])),
        tuple(chain.from_iterable([one.logprobs for one in run])),
        first.prompt_logprobs, run[-1].finish, first.cached_tokens, first.timing,
    )  # fmt: skip


Output = tuple[str, OutputStream]
"""A tenant, and one of its requests that has output to deliver."""


class FairDelivery:
    """Delivers output to requests: tenants in turn, and some at a time.

    A step of 128 requests has output for each, and wakes 128 tasks. If all were handed out at once,
    the turns of the loop would take that long, and a request of another tenant takes several turns.
    But a busy loop has few turns in a second. So what has waited long is handed out at once: a
    backlog would make every answer late."""

    PORTION = 32
    """Requests in a turn of the loop,"""
    DELAY_S = 0.005
    """and those that have waited so long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[str, deque[tuple[float, OutputStream]]] = {}
        """Tenant -> its requests, oldest first. The tenant whose turn it is comes first."""
        self._scheduled = False
        self.paced = False
        """Whether slow clients get several tokens at a time: in an overload."""
        self.delay_s = 0.0
        """How long output took lately from the controller to its request."""

    def add(self, items: Iterable[Output], since_s: float) -> None:
        """Hand output out. `since_s`: when the controller sent it, as `time.monotonic` counts.
        Called on the event loop."""
        for tenant, stream in items:
            self._due.setdefault(tenant, deque()).append((since_s, stream))
        if not self._scheduled:
            self._deliver()

    def _deliver(self) -> None:
        self._scheduled = False
        now, number = time.monotonic(), 0
        while self._due:
            tenant, items = next(iter(self._due.items()))
            since_s, stream = items[0]
            waited_s = now - since_s
            if number >= self.PORTION and waited_s < self.DELAY_S:
                self._scheduled = True
                self._loop.call_soon(self._deliver)
                return
            if number == 0:
                self.delay_s = waited_s
            number += 1
            stream.deliver(paced=self.paced)
            items.popleft()
            del self._due[tenant]
            if items:
                self._due[tenant] = items  # behind the others
