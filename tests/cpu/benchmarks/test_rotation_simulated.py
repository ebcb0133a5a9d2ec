"""Rotation in the simulator, in a short form: rows of each seed and order, and bars."""

import json
from pathlib import Path
from typing import Any

import rotation_simulated


def simulated(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the benchmark with two seeds of three seconds. Return its results."""
    out = folder / "simulated.json"
    rotation_simulated.main(
        ["--seconds", "3", "--seeds", "1,2", "--output", "64", *arguments, "--out", str(out)]
    )
    return json.loads(out.read_text())["results"]


def test_two_seeds_and_two_orders(tmp_path: Path) -> None:
    results = simulated(
        tmp_path, "--rates", "4,8", "--orders", "rotation,first-come", "--kv-gb", "0.5",
        "--prompt", "2048",
    )  # fmt: skip
    rows = {(row["seed"], row["order"], row["rate"]): row for row in results["rows"]}
    assert len(rows) == len(results["rows"]) == 8
    for (seed, order, rate), row in rows.items():
        assert row["requests"] == rows[seed, "first-come", rate]["requests"] > 0
        assert row["ttft_in_time"] >= rows[seed, "first-come", rate]["ttft_in_time"]
        assert (row["moved_bytes"] > 0) is (order == "rotation")
    assert results["spread"]["preempted"] == 0, "no KV is lost"


def test_a_second_model_has_shares_of_its_own(tmp_path: Path) -> None:
    results = simulated(
        tmp_path, "--rates", "4", "--orders", "rotation", "--beside", "llama-3b",
        "--beside-rate", "1",
    )  # fmt: skip
    [row] = results["models"]
    assert set(row["shares"]) == {"llama-8b.1", "llama-3b.1"}
    assert 0.0 < row["least"] <= 1.0
