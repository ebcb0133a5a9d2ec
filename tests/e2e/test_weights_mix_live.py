"""The weights mix on a real server: tiny models, a CPU slice, live beside simulated."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "weights_mix.py"


def run(tmp_path: Path, *arguments: str) -> tuple["subprocess.CompletedProcess[str]", Any]:
    out = tmp_path / "mix.json"
    command = [
        sys.executable, str(SCRIPT), "--tiny", "--pool-dir", str(tmp_path), "--out", str(out),
        "--ready-s", "400", "--budget-s", "10000", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    return done, json.loads(out.read_text())["results"] if out.exists() else None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_worlds_answer_the_same_requests(tmp_path: Path) -> None:
    done, results = run(tmp_path, "--cells", "0.05:4,0.1:8", "--requests", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["cell"] for row in results["rows"]] == ["0.1:8", "0.05:4"], "largest arena first"
    for row in results["rows"]:
        live, simulated = row["live"], row["simulated"]
        assert live["requests"] == simulated["requests"] == 16
        assert live["answered"] == simulated["answered"] == 16
        assert {name: one["requests"] for name, one in live["models"].items()} == {
            name: one["requests"] for name, one in simulated["models"].items()
        }
        assert live["counters"]["output_tokens_total"] > 16
        assert live["ttft_p50_s"] > 0
    assert set(results["times"]["prefill"]) == {"tiny-llama", "tiny-tied"}
    assert "measured on this machine" in results["times"]["source"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"mix.json", "mix.0.1.log", "mix.0.05.log"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_has_no_answer_in_time_is_missed_and_the_run_ends(tmp_path: Path) -> None:
    cells = ("--cells", "0.05:20", "--requests", "20", "--seeds", "1", "--answer-s", "0.001")
    done, results = run(tmp_path, "--live-only", *cells)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = results["rows"]
    assert row["live"]["unanswered"] == 20
    assert row["live"]["in_time"] == 0.0
    assert "simulated" not in row
    assert results["times"] is not None, "for simulating it later"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_does_not_start_is_a_failure_with_its_words(tmp_path: Path) -> None:
    done, results = run(tmp_path, "--cells", "0.05:4", "--serve", "--threads 1000")
    assert done.returncode == 1
    assert "1000 threads per slice" in results["failed"]["0.05"]
