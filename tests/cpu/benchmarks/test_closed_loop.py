"""Closed loops against a real server with a tiny model: what is counted is what was asked for."""

import json
import sys
from pathlib import Path

import closed_loop
import pytest


def test_rows_of_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "loops.json"
    serve = "--gpu-slices none --slices 1 --kv-bytes 33554432"
    arguments = [
        "closed_loop.py", "--shape", "tiny-llama", "--users", "1,5", "--prompt", "20", "--output",
        "6", "--serve", serve, "--work", str(tmp_path), "--out", str(out),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    closed_loop.main()
    results = json.loads(out.read_text())["results"]
    one, five = results["rows"]
    assert (one["users"], one["requests"], one["failed"]) == (1, 6, 0)
    assert (five["users"], five["requests"], five["failed"]) == (5, 20, 0)
    for row in (one, five):
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        # On busy cores most answers of 6 tokens come in one piece.
        assert 0 <= row["tpot_p50_ms"] <= row["tpot_p99_ms"]
        assert row["output_tokens_per_s"] > 0
    assert results["counters"]["c2cserve:slice_output_tokens_total"] == (6 + 20 + 8) * 6
