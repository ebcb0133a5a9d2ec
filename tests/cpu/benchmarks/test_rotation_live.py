"""Rotation against other orders: real servers with a tiny model, and what is made of their rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import rotation_live

from c2cserve.bench.loadgen_reply import Record


@pytest.mark.slow
def test_orders_of_real_servers(tmp_path: Path) -> None:
    out = tmp_path / "rotation.json"
    rotation_live.main(
        ["--cpu", "--shape", "tiny-llama", "--kv-gb", "0.004", "--rates", "8", "--seconds", "1",
         "--prompt", "24", "--output", "8", "--orders", "rotation,first-come",
         "--work", str(tmp_path), "--out", str(out)]
    )  # fmt: skip
    results = json.loads(out.read_text())["results"]
    rows = {row["order"]: row for row in results["rows"]}
    assert rows.keys() == {"rotation", "first-come"}
    assert rows["rotation"]["requests"] == rows["first-come"]["requests"] > 0
    assert rows["rotation"]["answered"] > 0
    assert results["answers"]["compared"] > 0
    assert results["answers"]["different"] == 0


def row(order: str, rate: float, ttft: float, tbt: float) -> dict[str, Any]:
    return {"order": order, "rate": rate, "ttft_in_time": ttft, "tbt_in_time": tbt}


def test_the_bar_is_at_the_rate_where_half_of_first_comes_are_in_time() -> None:
    rows = [
        row("first-come", 4, 0.9, 1.0), row("first-come", 8, 0.1, 0.8),
        row("rotation", 4, 1.0, 1.0), row("rotation", 8, 0.8, 0.8),
    ]  # fmt: skip
    ttft, tbt = rotation_live.bars(rows)
    assert ttft["rate"] == tbt["rate"] == pytest.approx(6.0)
    assert ttft["value"] == pytest.approx(0.9 / 0.5)
    assert ttft["met"]
    assert tbt["value"] == pytest.approx(1.0)
    assert rotation_live.bars(rows[:1]) == []
    assert rotation_live.bars([row("first-come", 4, 1.0, 1.0), row("rotation", 4, 1.0, 1.0)]) == []


def test_a_request_without_an_answer_is_not_in_time() -> None:
    records = [
        Record(0, "m", 0.0, first_s=1.0, last_s=1.5, gaps_s=[0.25, 0.25], output_tokens=3),
        Record(1, "m", 0.0, error="http 429"),
        Record(2, "m", 1.0, first_s=9.0, last_s=9.1, gaps_s=[0.1], output_tokens=2),
    ]
    found = rotation_live.figures(records, {})
    assert found["ttft_in_time"] == pytest.approx(1 / 3)
    assert found["tbt_in_time"] == pytest.approx(1 / 3)
    assert found["both_in_time"] == 0.0
    assert found["errors"] == ["http 429"]
    assert found["gaps_in_time"] == pytest.approx(1 / 3)


def test_texts_of_one_rate_are_compared() -> None:
    rows = [
        {"rate": 1, "texts": {"0": "a", "1": "b"}}, {"rate": 1, "texts": {"0": "a", "1": "c"}},
        {"rate": 2, "texts": {"1": "d"}},
    ]  # fmt: skip
    assert rotation_live.equal_answers(rows) == {"compared": 2, "different": 1}
