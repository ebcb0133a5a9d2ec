"""`bench switch` against a server whose switch takes a known time."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_openai import fake_openai

from c2cserve.bench.scrape import Histogram
from c2cserve.bench.switch import plan_sequence
from c2cserve.cli.main import app


def bench(tmp_path: Path, *args: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit) as done:
        app(["bench", "switch", "--out", str(out), *args])
    assert done.value.code == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document["results"]


@pytest.mark.alone
def test_the_difference_is_the_switch(tmp_path: Path) -> None:
    with fake_openai(models="a,b", ttft_s=0.004, switch_s=0.006) as url:
        found = bench(tmp_path, "--url", url, "--pairs", "60")
    assert found["same"]["p50"] == pytest.approx(0.004, abs=0.002)
    assert found["overhead_p50_s"] == pytest.approx(0.006, abs=0.001)
    assert found["overhead_p50_low_s"] <= found["overhead_p50_s"] <= found["overhead_p50_high_s"]
    assert found["slice_switches"] >= found["expected_switches"] > 60


@pytest.mark.alone
def test_no_difference_where_there_is_none(tmp_path: Path) -> None:
    with fake_openai(models="a,b,c", ttft_s=0.003) as url:
        found = bench(tmp_path, "--url", url, "--models", "a,b,c", "--pairs", "60")
    assert abs(found["overhead_p50_s"]) < 5e-4


def test_one_model_can_not_switch(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai() as url, pytest.raises(SystemExit) as done:
        app(["bench", "switch", "--url", url])
    assert done.value.code == 2
    assert "two different" in capsys.readouterr().err


def test_kinds_are_what_they_say_and_balanced() -> None:
    turns = list(plan_sequence(["a", "b", "c"], 100))
    for before, probe in pairwise(turns):
        if probe.measured:
            assert (probe.model != before.model) == probe.switched
    for model in "abc":
        own = [probe.switched for probe in turns if probe.measured and probe.model == model]
        assert sum(own) * 2 == len(own)
    assert sum(probe.measured and probe.switched for probe in turns) >= 100


def test_histogram_quantiles_and_differences() -> None:
    before = Histogram(((0.001, 5.0), (0.01, 10.0), (float("inf"), 10.0)), 0.05)
    after = Histogram(((0.001, 5.0), (0.01, 30.0), (float("inf"), 30.0)), 0.15)
    between = after.since(before)
    assert between.count == 20
    assert between.sum == pytest.approx(0.1)
    assert between.quantile(0.5) == pytest.approx(0.0055)
    assert Histogram(((float("inf"), 0.0),), 0.0).quantile(0.5) is None
