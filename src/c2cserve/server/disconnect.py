"""Clients that go away: what is done for them ends at once.

The work runs in the task that asks for it, not in one of its own: a first token is sent as soon as
it is there, with no other task to be scheduled in between.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work returns or raises; None when the client went away first, the work is cancelled
    then (and with it its jobs). `receive` has nothing more to say but that."""
    working = asyncio.current_task()
    assert working is not None
    others, gone = working.cancelling(), False

    async def leave() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        working.cancel()

    leaving = asyncio.create_task(leave())
    try:
        return await work
    except asyncio.CancelledError:
        # If somebody else cancelled as well, that is theirs to see.
        if not gone or working.uncancel() > others:
            raise
        return None
    finally:
        leaving.cancel()


class EventStream(StreamingResponse):
    """Server-sent events, until their end or until the client is gone."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self.stream_response(send))
