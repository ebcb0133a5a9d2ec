"""What GEMM benchmarks measure, how they sum it up, and their plots: all that needs no GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")  # launchers, which the benchmark imports, bind the driver

import gemm_counters
from fake_gemm import CHOOSER, FakeBench, install
from gemm_cases import (
    LINEARS,
    ROWS,
    Budget,
    Case,
    Linear,
    chain_length,
    label,
    slice_cases,
    table_cases,
    worth_timing,
)
from gemm_figures import figures
from gemm_plots import plot_all
from gemm_summary import (
    floor_s,
    geometric_mean,
    interference,
    seconds_at_once,
    shares,
    summary,
    summary_lines,
)
from gemm_table import paper_shape, table

from c2cserve.kernels.gpu.gemm.traffic import Tiles

ROOT = Path(__file__).parents[3]
O_PROJ = next(one for one in LINEARS if (one.model, one.name) == ("Llama-3-8B", "o"))


def test_the_table_covers_every_linear_row_count_and_home_once() -> None:
    cases = table_cases(["peer", "host"], 132)
    assert len(cases) == len(set(cases)) == len(LINEARS) * len(ROWS) * 2
    weights = [case.linear.bytes for case in cases]
    assert weights == sorted(weights)
    assert set(table_cases(["host"], 132, quick=True)) < set(cases)
    assert {case.sms for case in slice_cases(["host"], 16)} == {16}


def test_linears_add_up_to_their_models() -> None:
    """Parameters of a layer (attention and MLP), from the models' published configurations."""
    layers = {"Llama-3-8B": 218_103_808, "Llama-3-70B": 855_638_016, "Qwen3-30B-A3B": 622_854_144}
    for model, parameters in layers.items():
        assert sum(one.bytes // 2 for one in LINEARS if one.model == model) == parameters


def test_worth_timing_begins_with_the_pick_and_leaves_out_what_is_hopeless() -> None:
    case = Case(O_PROJ, 2048, "peer", 132)
    estimates, choice = CHOOSER.estimates(case.question), CHOOSER.pick(case.question)
    pick = (choice.dataflow, choice.tiles)
    found = worth_timing(estimates, pick)
    assert (found[0].dataflow, found[0].tiles) == pick
    assert not {one.dataflow for one in found} & {"sym", "asym", "hybrid"}
    assert all(one.predicted_s <= 3 * found[0].predicted_s for one in found)
    assert len({one.dataflow for one in found[:3]}) == 3, "other dataflows before other tiles"
    with_paper = worth_timing(estimates, pick, published=True)
    assert {one.dataflow for one in with_paper} >= {"sym", "asym", "hybrid"}
    sym = next(one for one in estimates if one.dataflow == "sym")
    assert worth_timing(estimates, ("sym", sym.tiles))[0] is sym


def test_chains_are_long_where_gemms_overlap_and_short_where_they_take_a_second() -> None:
    assert chain_length(1.0, "prefetch") == 16
    assert chain_length(1.0, "sym") == 2
    assert chain_length(1e-5, "sym") == 16
    assert 2 < chain_length(0.01, "sym") < 16


def test_labels_name_a_prefetch_in_one_panel() -> None:
    assert label("prefetch", Tiles(panel_rows=4096, panel_growth=1), 4096) == "prefetch (whole)"
    assert "2048" in label("prefetch", Tiles(panel_rows=2048), 4096)


def test_a_budget_is_shared_by_weight_and_what_a_case_overran_the_rest_lack() -> None:
    budget = Budget(10.0, [1.0, 1.0, 2.0], now_s=100.0)
    assert budget.next_until_s(100.0) == pytest.approx(102.5)
    assert budget.next_until_s(106.0) == pytest.approx(106.0 + 4.0 / 3)
    assert budget.next_until_s(120.0) == 120.0, "out of time: what must be done, no more"


def test_floors_and_means() -> None:
    assert floor_s(2e-3, 100e6, 50e9) == 2e-3
    assert floor_s(1e-3, 100e6, 50e9) == pytest.approx(2e-3)
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="nothing"):
        geometric_mean([])


def _row(home: str, pick: float | None, other: float) -> dict[str, Any]:
    candidates = [
        {"dataflow": "direct", "seconds": pick},
        {"dataflow": "ring", "seconds": other},
        {"dataflow": "ring", "seconds": 2 * other},
    ]
    ran = [one["seconds"] for one in candidates if one["seconds"] is not None]
    return {
        "home": home, "model": "m", "linear": "o", "m": 1, "floor_s": 1.0, "pick": "direct",
        "pick_s": pick, "best_s": min(ran), "candidates": candidates,
    }  # fmt: skip


def test_the_summary_of_a_home() -> None:
    rows = [_row("peer", 1.0, 3.0), _row("peer", 1.44, 1.2), _row("host", None, 2.0)]
    found = summary(rows)
    peer, host = found["peer"], found["host"]
    assert peer["pick"] == {"cases": 2, "mean": pytest.approx(1.2), "max": 1.44}
    assert (peer["over_limit"], peer["failed"]) == (1, 0)
    assert peer["pick_over_best"] == pytest.approx(math.sqrt(1.2))
    assert peer["dataflows"]["ring"]["max"] == 3.0, "each dataflow at its best tiles"
    assert (host["pick"]["cases"], host["failed"]) == (0, 1)
    assert any("1.200x" in line for line in summary_lines(found))


def test_only_what_happens_while_all_are_at_work_counts() -> None:
    assert seconds_at_once([[1.0, 2.0], [1.0, 2.0]]) == [1.0, 1.0]
    # The second would have taken 3 s each; alone from 2 s on, it takes 1 s for its last.
    first, second = seconds_at_once([[1.0, 2.0], [3.0, 4.0]])
    assert (first, second) == (1.0, pytest.approx(3.0))
    assert seconds_at_once([[4.0], [2.0]]) == [4.0, 2.0]


def test_shares_and_interference() -> None:
    even = shares([10.0] * 7, 70.0)
    assert even["within_bar"]
    assert even["worst_off"] == pytest.approx(0.0)
    uneven = shares([11.0, 9.0], 20.0)
    assert not uneven["within_bar"]
    assert abs(uneven["worst_off"]) == pytest.approx(0.1)
    assert interference([10.0, 10.0], [8.0, 6.0]) == pytest.approx(0.3)


def test_a_table_times_the_pick_even_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    cases = [Case(O_PROJ, m, "peer", 132) for m in (1, 2048)]
    for row in table(FakeBench(), CHOOSER, cases, budget_s=0.0)["rows"]:
        [only] = row["candidates"]
        assert only["tiles"] == row["pick"] == row["best"]
        assert row["pick_s"] == only["seconds"] > row["floor_s"]
    [small, large] = table(FakeBench(), CHOOSER, cases, budget_s=60.0)["rows"]
    assert len(small["candidates"]) > 1
    assert {"sym", "asym", "hybrid"} <= {one["dataflow"] for one in large["candidates"]}


def test_a_pick_that_is_refused_is_counted_and_a_wrong_one_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(O_PROJ, 1, "peer", 132)
    picked = CHOOSER.pick(case.question).dataflow
    install(monkeypatch, refuses=[picked])
    found = table(FakeBench(), CHOOSER, [case], budget_s=60.0)
    assert found["rows"][0]["pick_s"] is None
    assert found["rows"][0]["candidates"][0]["refused"]
    assert found["summary"]["peer"]["failed"] == 1
    install(monkeypatch, wrong=[picked])
    with pytest.raises(ValueError, match="off by"):
        table(FakeBench(), CHOOSER, [case], budget_s=60.0)


def test_the_papers_shape_is_run_by_every_dataflow(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    found = paper_shape(FakeBench(), CHOOSER, "peer", quick=True)
    ran = {one["dataflow"] for one in found["candidates"]}
    assert ran >= {"prefetch", "direct", "tee", "ring", "sym", "asym", "hybrid"}
    assert found["pick_s"] in {one["seconds"] for one in found["candidates"]}
    sym = next(one for one in found["candidates"] if one["dataflow"] == "sym")
    assert sym["link_bytes"] == 40 * 134_217_728, "C2CServe, section 3.2: 5.37 GB"


def test_results_become_plots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch)
    bench = FakeBench(["peer"])
    linears: list[Linear] = [one for one in LINEARS if one.model != "Llama-3-70B"]
    cases = [Case(one, m, h, 132) for one in linears for m in (1, 2048) for h in bench.homes]
    results = {
        "gpu": "a GPU that is not there",
        "link_bytes_per_s": bench.link_bytes_per_s,
        "table": table(bench, CHOOSER, cases, budget_s=60.0),
        "slice": table(bench, CHOOSER, slice_cases(["peer"], 16, quick=True), budget_s=60.0),
        "paper": [paper_shape(bench, CHOOSER, home, quick=True) for home in bench.homes],
        "figures": figures(bench, CHOOSER, quick=True),
    }
    made = plot_all(json.loads(json.dumps(results)), tmp_path)
    names = {path.name for path in made}
    assert names >= {"gemm_pick.png", "gemm_paper_shape.png", "gemm_slice.png"}
    assert names >= {f"figure_{n}_{home}.png" for n in (4, 5, 6, 8) for home in bench.homes}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","fill","dram__bytes_write.sum","byte","1,000"
"1","hybrid","dram__bytes_write.sum","byte","2,000"
"1","hybrid","nvlrx__bytes.sum","byte","1073741824"
"1","hybrid","lts__t_sectors_aperture_peer.sum","sector","33554432"
"1","hybrid","pcie__read_bytes.sum","byte","n/a"
"""


def test_counters_are_summed_over_kernels_and_put_beside_the_count() -> None:
    counters = gemm_counters.read_counters(NCU.splitlines())
    assert counters["dram__bytes_write"] == 3000
    assert "pcie__read_bytes" not in counters
    found = gemm_counters.compare("peer", "sym", counters)
    assert found["counted"]["link_bytes"] == 1 << 30, "W of 128 MiB, 8 times"
    assert found["link_over_counted"] == {
        "nvlrx__bytes": pytest.approx(1.0),
        "lts__t_sectors_aperture_peer": pytest.approx(1.0),
    }
    assert "nvlrx__bytes 1.000" in gemm_counters.line(found)
    with pytest.raises(ValueError, match="may this user"):
        gemm_counters.read_counters(["==ERROR== ERR_NVGPUCTRPERM"])


def test_unknown_parts_are_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gemm.py"), "--parts", "tables"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no such parts: tables" in done.stderr


def test_gpu_check_goes_on_after_a_failure_and_says_so_in_the_end(tmp_path: Path) -> None:
    script, environment = str(ROOT / "scripts" / "gpu_check"), {**os.environ, "PYTHON": "false"}
    command = [script, "--only", "tests,profile", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 1
    assert "failed: tests_gemm tests_engine tests_server profile" in done.stderr
    parts = [json.loads(path.read_text()) for path in tmp_path.glob("verdict_*.json")]
    assert {part["part"]: part["exit"] for part in parts} == {
        "tests_gemm": 1, "tests_engine": 1, "tests_server": 1, "profile": 1,
    }  # fmt: skip
    unknown = subprocess.run(
        [script, "--only", "test"], capture_output=True, text=True, timeout=60, check=False
    )
    assert unknown.returncode == 2
