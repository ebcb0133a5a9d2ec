"""KV rotates on a server's GPU slice: the controller sends it more than its memory holds."""

import json
from pathlib import Path

import pytest
import rotation_live

pytestmark = pytest.mark.gpu


def test_requests_rotate_and_are_answered_as_first_come_ones(tmp_path: Path) -> None:
    """An 8B with 1 GB for KV, under twice the requests that this holds. Rows of steps are too few
    for kernels that depend on their number."""
    out = tmp_path / "rotation.json"
    rotation_live.main(
        ["--orders", "rotation,first-come", "--kv-gb", "1", "--rates", "6", "--seconds", "6",
         "--prompt", "2048", "--output", "256", "--out", str(out)]
    )  # fmt: skip
    results = json.loads(out.read_text())["results"]
    rows = {row["order"]: row for row in results["rows"]}
    assert rows["rotation"]["rotated"]["out"] > 1e9, "more than its memory holds"
    assert rows["rotation"]["rotated"]["in"] > 0
    assert rows["rotation"]["ttft_in_time"] >= rows["first-come"]["ttft_in_time"]
    assert results["answers"]["compared"] > 0
    assert results["answers"]["different"] == 0
