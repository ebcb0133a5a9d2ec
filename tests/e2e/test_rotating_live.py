"""KV rotates on a live server: requests take turns, and every answer is the one without turns."""

import asyncio
from pathlib import Path

from server_process import ServerProcess
from streams import MODELS, stream_text

REQUESTS, TOKENS = 40, 200
SLAB = 2 << 20
"""The memory of the slice: KV of a dozen requests."""


async def streams(url: str) -> list[str]:
    """All of one model: they wait for each other, and not for its weights."""
    return await asyncio.gather(
        *(stream_text(url, len(MODELS) * i, TOKENS) for i in range(REQUESTS))
    )


def test_requests_take_turns_and_answers_stay_the_same(
    server: ServerProcess, tmp_path: Path
) -> None:
    expected = asyncio.run(streams(server.url))
    args = ("--kv-bytes", str(SLAB), "--host-kv-bytes", str(32 * SLAB))
    with ServerProcess(*args, directory=tmp_path / "pool", slices=1) as rotating:
        assert asyncio.run(streams(rotating.url)) == expected
        moved = {
            way: rotating.metric(rf"c2cserve:slice_kv_{way}_bytes_total\{{.*\}}")
            for way in ("out", "in")
        }
    assert moved["out"] > SLAB, "more than its memory holds"
    assert moved["in"] > 0
