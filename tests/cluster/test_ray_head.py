"""Ray's head dies, and comes back with the state that it kept in Redis."""

import asyncio
import logging
import shutil
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray_cluster import Front, Machines, Redis
from streams import all_streams

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.skipif(not shutil.which("redis-server"), reason="no redis-server on PATH"),
]
STREAMS, TOKENS = 12, 300


def test_with_redis_the_head_comes_back_and_a_machine_joins(tmp_path: Path) -> None:
    """The head's GCS and its whole machine are killed under streams. The other nodes stay."""
    with (
        Redis(tmp_path) as redis,
        Machines(3, joined=False, redis=redis.address) as machines,
        Front(machines.address, directory=tmp_path / "pool") as front,
    ):
        front.wait_nodes(3)
        undisturbed = asyncio.run(all_streams(front.url, STREAMS, TOKENS))
        before = {one["pid"] for one in front.state()["slices"]}

        async def scenario() -> list[str]:
            begun = asyncio.Event()
            streams = asyncio.create_task(all_streams(front.url, STREAMS, TOKENS, begun))
            await begun.wait()
            await asyncio.to_thread(machines.kill_head)
            return await streams

        assert asyncio.run(scenario()) == undisturbed
        front.wait_nodes(2)
        killed_s = time.monotonic()
        while time.monotonic() - killed_s < 15.0:
            assert asyncio.run(all_streams(front.url, STREAMS, TOKENS)) == undisturbed
        assert front.state()["members_age_s"] > 10.0
        machines.start_head_service()
        back_s = time.monotonic()
        machines.add()
        front.wait_nodes(3)
        log.info("%.1f s from the head's return to three nodes", time.monotonic() - back_s)
        assert front.state()["members_age_s"] < 10.0
        after = {one["pid"] for one in front.state()["slices"]}
        assert len(before & after) == 2, "the machines that lived kept their nodes"
        assert asyncio.run(all_streams(front.url, STREAMS, TOKENS)) == undisturbed
