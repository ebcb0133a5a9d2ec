"""Requests that do not fit into a slice together take turns in it, and clients do not notice."""

import asyncio
import re
from pathlib import Path

from seeded_answers import seeded_answers
from server_process import ServerProcess

REQUESTS, TOKENS = 12, 360


async def answers(url: str) -> list[str]:
    return await seeded_answers(url, REQUESTS, TOKENS, lambda index: f"sort: dcba {index}")


def metric(server: ServerProcess, name: str) -> float:
    found = re.search(
        rf'^c2cserve:slice_{name}{{slice="cpu0"}} (\S+)$', server.get("/metrics")[1], re.M
    )
    assert found is not None, name
    return float(found[1])


def test_more_requests_than_memory_holds(server: ServerProcess, tmp_path: Path) -> None:
    undisturbed = asyncio.run(answers(server.url))
    assert metric(server, "kv_out_bytes_total") == 0
    # One slab: 170 blocks of 16 tokens, for requests that come to 12 x 24 of them.
    tight = ("--kv-bytes", str(2 << 20), "--host-kv-bytes", str(16 << 20))
    with ServerProcess(*tight, directory=tmp_path / "tight", slices=1) as tight_server:
        assert asyncio.run(answers(tight_server.url)) == undisturbed
        assert metric(tight_server, "kv_in_bytes_total") > 0
        assert metric(tight_server, "kv_out_bytes_total") > 0
        assert metric(tight_server, "kv_host_bytes") == 0, "nothing is left of who has gone"
        assert metric(tight_server, "kv_total_bytes") == 2 << 20
