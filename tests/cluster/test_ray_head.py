"""Ray's head dies, and comes back with the state that it kept in Redis."""

import logging
import shutil
import time
from pathlib import Path

import pytest
from disturbing import disturbed_streams, undisturbed_streams
from ray_cluster import Front, Machines, Redis

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("redis-server"), reason="no redis-server on PATH"),
]


def test_with_redis_the_head_comes_back_and_a_machine_joins(tmp_path: Path) -> None:
    """The head's GCS and its whole machine are killed under streams. The other nodes stay."""
    with (
        Redis(tmp_path) as redis,
        Machines(3, joined=False, redis=redis.address) as machines,
        Front(machines.address, directory=tmp_path / "pool") as front,
    ):
        front.wait_nodes(3)
        undisturbed = undisturbed_streams(front)
        before = {one["pid"] for one in front.state()["slices"]}
        assert disturbed_streams(front, machines.kill_head) == undisturbed
        front.wait_nodes(2)
        killed_s = time.monotonic()
        while time.monotonic() - killed_s < 15.0:
            assert undisturbed_streams(front) == undisturbed
        assert front.state()["members_age_s"] > 10.0
        machines.start_head_service()
        back_s = time.monotonic()
        machines.add()
        front.wait_nodes(3)
        log.info("%.1f s from the head's return to three nodes", time.monotonic() - back_s)
        assert front.state()["members_age_s"] < 10.0
        after = {one["pid"] for one in front.state()["slices"]}
        assert len(before & after) == 2, "the machines that lived kept their nodes"
        assert undisturbed_streams(front) == undisturbed
