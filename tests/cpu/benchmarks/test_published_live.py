"""C2CServe's figures on live servers: what is made of the runs, and real servers of CPU slices."""

import json
from pathlib import Path
from typing import Any, get_args

import published_live
import pytest

from c2cserve.core.policy_names import PolicyName


def run(policy: str, ttft_ms: float, requests: int = 10, **counts: float) -> dict[str, Any]:
    return {
        "policy": policy, "requests": requests, "in_time": 0.5, "ttft_mean_ms": ttft_ms,
        "ttft_p99_ms": 2 * ttft_ms, "tpot_p50_ms": 10.0, **counts,
    }  # fmt: skip


def test_figures_name_policies_of_a_server() -> None:
    for figure, policies in published_live.FIGURES.items():
        assert set(policies) <= set(get_args(PolicyName))
        assert policies[0] in published_live.PUBLISHED_S, figure


def test_rows_are_means_over_rounds_and_ratios_to_the_first() -> None:
    streamed = "slice_weights_streamed_bytes_total"
    runs = [
        run("aegaeon", 300.0), run("aegaeon", 500.0),
        run("aegaeon-hybrid", 100.0, **{streamed: 3e9}),
        run("aegaeon-hybrid", 300.0, **{streamed: 1e9}),
    ]  # fmt: skip
    loaded, hybrid = published_live.rows_of(13, runs)
    assert (loaded["ttft_mean_ms"], loaded["over_first"]) == (400.0, 1.0)
    assert (hybrid["requests"], hybrid["over_first"]) == (20, 0.5)
    assert hybrid["weights_streamed_gb_per_request"] == 0.2
    assert hybrid["published_over_first"] == pytest.approx(0.15 / 0.48, abs=1e-3)
    assert (loaded["hybrid_alpha"], hybrid["hybrid_alpha"]) == (None, 0.0)


def test_figure_14_is_of_the_99th_percentile() -> None:
    runs = [run(policy, 100.0 + 10 * i) for i, policy in enumerate(published_live.FIGURES[14])]
    rows = published_live.rows_of(14, runs)
    assert [row["over_first"] for row in rows] == [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert rows[-1]["policy"] == "c2cserve"
    assert rows[-1]["published_over_first"] is None


@pytest.mark.slow
def test_real_servers_of_cpu_slices(tmp_path: Path) -> None:
    out = tmp_path / "published.json"
    published_live.main(
        ["--cpu", "--figures", "13", "--rate", "2", "--seconds", "2", "--rounds", "1",
         "--work", str(tmp_path), "--out", str(out)]
    )  # fmt: skip
    found = json.loads(out.read_text())
    rows = {row["policy"]: row for row in found["results"]["figure 13"]}
    assert rows.keys() == {"aegaeon", "aegaeon-hybrid"}
    for row in rows.values():
        assert row["requests"] == 4
        assert row["ttft_mean_ms"] > 0.0
        assert row["alpha_changes"] == 0, "CPU slices have no alpha"
