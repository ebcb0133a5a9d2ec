"""Disconnects: when a client leaves, the work for it ends at once.

The work runs in the calling task, not in a task of its own. So a first token is sent as soon as it
arrives, without scheduling another task in between.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return or raise the outcome of `work`. Return None if the client leaves first; then the work
    and its jobs are cancelled. `receive` must have nothing left to report but the disconnect."""
    working = asyncio.current_task()
    assert working is not None
    others, disconnected = working.cancelling(), False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        # Another cancellation of this task at the same time must reach its own caller.
        if not disconnected or working.uncancel() > others:
            raise
        return None
    finally:
        watching.cancel()


class EventStream(StreamingResponse):
    """A stream of events or lines, until its end or until the client is disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self.stream_response(send))
