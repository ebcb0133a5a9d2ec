"""The benchmark of prefixes from host memory: a real server, a tiny model, its arithmetic."""

import argparse
import json
from pathlib import Path
from typing import Any

import prefix_tier
import pytest


@pytest.mark.slow
def test_prompts_of_a_real_server_come_back(tmp_path: Path) -> None:
    out = tmp_path / "prefix.json"
    prefix_tier.main(
        ["--cpu", "--shape", "tiny-llama", "--tokens", "512,1024", "--repeats", "1",
         "--work", str(tmp_path), "--out", str(out)]
    )  # fmt: skip
    rows = json.loads(out.read_text())["results"]["rows"]
    assert [row["tokens"] for row in rows] == [512, 1024]
    assert all(row["host_s"] > 0 for row in rows)


def row(paths: int, host_s: float) -> dict[str, Any]:
    return {"tokens": 64, "paths": paths, "computed_s": 8.0, "host_s": host_s}


def test_ratios_are_to_computing_and_to_one_path() -> None:
    one, two = prefix_tier.compared([row(1, 2.0), row(2, 1.0)])
    assert (one["over_computing"], one["over_one_path"]) == (4.0, 1.0)
    assert (two["over_computing"], two["over_one_path"]) == (8.0, 2.0)
    assert "over_one_path" not in prefix_tier.compared([row(2, 1.0)])[0]


def test_a_prompt_that_is_not_where_it_should_be_is_a_difference() -> None:
    prefix_tier.check("computed", 64, 0, 0)
    prefix_tier.check("host", 64, 48, 48)
    prefix_tier.check("arena", 64, 48, 0)
    for where, cached, came in (("computed", 48, 0), ("host", 48, 0), ("arena", 48, 48)):
        with pytest.raises(prefix_tier.Difference, match=where):
            prefix_tier.check(where, 64, cached, came)


@pytest.mark.parametrize("cpu", [True, False])
def test_what_fills_the_arena_is_more_than_it_caches(cpu: bool) -> None:
    given = argparse.Namespace(tokens=[16384, 65536], cpu=cpu, shape="llama-8b")
    block = 2 << 20
    room = prefix_tier.Room(given, block)
    longest = 4096 * block
    cached = room.arena_bytes if cpu else room.arena_bytes // 2
    assert longest < cached < room.fills * longest
    assert room.host_bytes >= 2 * (room.fills + 1) * longest


def test_prompts_have_no_common_beginning() -> None:
    short, long, other = (prefix_tier.prompt_of(*one) for one in ((64, 1), (128, 1), (64, 2)))
    assert short[:16] != long[:16]
    assert short[:16] != other[:16]
