"""Two machines of different speed and cost: each model is served where its targets are met at least
cost."""

import json
import os
import urllib.request
from pathlib import Path

from ray_cluster import Front, Machines
from server_process import SPECIALISTS, wait_until

_TESTS = Path(__file__).parents[1]
_CATALOG = """
[[models]]
id = "patient"
path = "{path}"
ttft_s = 100.0
tpot_s = 20.0

[[models]]
id = "hasty"
path = "{path}"
ttft_s = 100.0
tpot_s = 0.2
"""


def node_of(front: Front, model: str) -> str:
    """Return the end of the name of the node that answers."""
    body = {"model": model, "prompt": "sort: dcba", "max_tokens": 6, "ignore_eos": True}
    request = urllib.request.Request(
        f"{front.url}/v1/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.headers["x-c2cserve-slice"].partition("/")[0][-6:]


def test_a_dear_node_serves_only_what_would_be_late_on_a_cheap_one(tmp_path: Path) -> None:
    """Each step of the cheap one takes 0.4 s longer, as it measures itself."""
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "slow-400").touch()
    code = [str(_TESTS / "e2e" / "step_faults"), str(_TESTS), os.environ.get("PYTHONPATH", "")]
    catalog = tmp_path / "catalog.toml"
    catalog.write_text(_CATALOG.format(path=SPECIALISTS / "sorter-llama"))
    with Machines(1, joined=False, cost=10.0) as machines:
        cheap = machines.add(
            1.0, PYTHONPATH=os.pathsep.join(filter(None, code)), C2CSERVE_TEST_FAULTS=str(faults)
        )
        with Front(machines.address, directory=tmp_path / "pool", catalog=catalog) as front:
            front.wait_nodes(2)
            assert {node_of(front, "patient") for _ in range(3)} == {cheap}
            wait_until(lambda: node_of(front, "hasty") != cheap, 120, "hasty is on the dear one")
            assert cheap not in {node_of(front, "hasty") for _ in range(5)}
            assert {node_of(front, "patient") for _ in range(3)} == {cheap}
            assert "cost 10" in front.log.read_text()
