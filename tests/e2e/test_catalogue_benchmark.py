"""The GPU's main job, all of it, on CPU slices: tiny models of every kind, a worker killed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_catalogue.py"


def run(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    out = tmp_path / "catalogue.json"
    command = [
        sys.executable, str(SCRIPT), "--models", "4", "--mix",
        "tiny-llama:1,tiny-tied:1,tiny-moe:1", "--work", str(tmp_path), "--pool-dir",
        str(tmp_path), "--out", str(out), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    return done, json.loads(out.read_text())["results"]


def test_every_answer_is_right(tmp_path: Path) -> None:
    serve = "--slices 1 --threads 1 --gpu-slices none"
    done, results = run(
        tmp_path, "--serve", serve, "--long", "40", "--switches", "12", "--kill"
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert results["failed"] == {}
    for phase, answers in {"interleaved": 16, "switches": 12, "together": 16, "kill": 1}.items():
        compared = results["phases"][phase]["compared"]
        assert compared["answers"] == compared["equal"] == compared["bit_equal"] == answers
    assert results["between_models_rms"]["least"] > 0.15
    assert results["switch"]["count"] >= 11
    assert results["memory"]["flat"]
    assert results["phases"]["kill"]["metrics"]["c2cserve:slice_lost_total"] == 1
    assert results["phases"]["alone"]["shapes"]["tiny-moe"]["prompt 40"]["answers"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalogue.json", "catalogue.log"]


def test_a_server_that_does_not_start_is_a_failure_with_its_words(tmp_path: Path) -> None:
    done, results = run(tmp_path, "--serve", "--slices 0")
    assert done.returncode == 1
    assert "Invalid value for '--slices'" in results["failed"]["run"]
