"""Greedy streams at a front, and what happens to nodes while they run."""

import asyncio
from collections.abc import Callable

from ray_cluster import Front
from streams import all_streams

STREAMS, TOKENS = 12, 300


def undisturbed_streams(front: Front) -> list[str]:
    """Return what the streams say while nothing happens."""
    return asyncio.run(all_streams(front.url, STREAMS, TOKENS))


def disturbed_streams(front: Front, disturb: Callable[[], object]) -> list[str]:
    """Run the streams, and do something when they have begun. Return what they say."""

    async def scenario() -> list[str]:
        begun = asyncio.Event()
        streams = asyncio.create_task(all_streams(front.url, STREAMS, TOKENS, begun))
        await begun.wait()
        await asyncio.to_thread(disturb)
        return await streams

    return asyncio.run(scenario())
