"""`bench cold` against a real server: models leave the pool and answer while they return."""

import json
from pathlib import Path

import pytest
from server_process import ServerProcess, run_cli


def test_cold_and_warm(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "cold.json"
    loads = server.metric("c2cserve:model_loads_total")
    done = run_cli(
        "bench", "cold", "--url", server.url, "--models", "sorter-llama,reverser-moe",
        "--rounds", "2", "--input-len", "8", "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert server.metric("c2cserve:model_loads_total") == loads + 4
    found = json.loads(out.read_text())["results"]
    assert set(found["models"]) == {"sorter-llama", "reverser-moe"}
    for one in found["models"].values():
        assert one["weight_bytes"] > 0
        assert 0 < one["warm"]["p50"] < 60
        assert 0 < one["cold"]["p50"] < 60
    for kind in ("cold", "warm"):
        prefill = found["phases"][kind]["seconds"]["prefill"]["buckets"]
        assert prefill[-1][1] == 4, kind
    for word in ("cold", "warm", "loaded after", "prefill", "queue"):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["serve", "switch"])
def test_phases_of_other_measurements(server: ServerProcess, command: str) -> None:
    names = "sorter-llama,adder-qwen"
    more = {"serve": ("--model", names, "--requests", "10"), "switch": ("--models", names)}
    done = run_cli("bench", command, "--url", server.url, *more[command])
    assert done.returncode == 0, done.stderr
    assert "by the server's own account" in done.stdout
    assert "prefill" in done.stdout
    assert ("switch of model" in done.stdout) or command == "serve"
