"""A stream beside a resident model: the phases against a real server with tiny models."""

import json
from pathlib import Path

import pytest
import stream_beside

from c2cserve.bench.loadgen_reply import Record


def test_phases_of_a_real_server(tmp_path: Path) -> None:
    out = tmp_path / "beside.json"
    stream_beside.main(
        ["--cpu", "--near", "tiny-llama", "--far", "tiny-tied", "--tokens", "300", "--prompt", "8",
         "--output", "24", "--work", str(tmp_path), "--out", str(out)]
    )  # fmt: skip
    results = json.loads(out.read_text())["results"]
    # A server that is late sends several tokens at a time.
    assert 0 < results["near_alone"]["gaps"] <= 8 * 23
    assert 0 < results["far_alone"]["gaps"] <= 300 // 5 - 1
    for phase in ("near_beside", "far_beside"):
        assert 0 < results[phase]["p50_ms"] <= results[phase]["p99_ms"] <= results[phase]["max_ms"]
    ratios = results["ratios"]
    want = results["near_beside"]["p99_ms"] / results["near_alone"]["p99_ms"]
    assert ratios["near"]["p99_ms"] == pytest.approx(want)
    assert results["far_beside"]["tokens"] == 300
    assert not results["far_beside"]["cut"]
    assert "ms_per_gb" not in ratios["far"], "a CPU's weights stream over no link"


def test_only_times_within_the_window_count() -> None:
    record = Record(0, "m", 0.0, first_s=1.0, last_s=4.0, gaps_s=[0.5, 1.0, 1.5])
    assert stream_beside._gaps([record]) == [0.5, 1.0, 1.5]
    assert stream_beside._gaps([record], 1.2, 4.0) == [1.0, 1.5]
    assert stream_beside._gaps([record], 1.2, 3.9) == [1.0]


def test_slow_times_are_counted_by_the_phase_of_a_step_beside() -> None:
    far = Record(0, "far", 0.0, first_s=10.0, last_s=14.0, gaps_s=[2.0, 2.0])
    near = Record(0, "near", 0.0, first_s=9.5, last_s=14.5, gaps_s=[0.75, 0.125, 3.0, 0.9, 0.3])
    found = stream_beside.slow_by_phase([near], far, 0.5)
    # They begin at 9.5 (before the first step), 10.25, 10.375, 13.375 and 14.275 (after the last).
    assert {phase: one for phase, one in enumerate(found) if one[1]} == {
        2: (0, 1), 3: (1, 1), 13: (1, 1),
    }  # fmt: skip


def test_time_per_token_is_the_mean_of_a_request() -> None:
    records = [
        Record(0, "m", 0.0, first_s=1.0, last_s=4.0, gaps_s=[0.5, 2.5]),
        Record(0, "m", 0.0, first_s=0.5, last_s=9.5, gaps_s=[9.0]),
    ]
    assert stream_beside._tpot(records, 1.0, 4.0) == {"tpot_p99_ms": pytest.approx(1500.0)}
    assert stream_beside._tpot(records, 2.0, 3.0) == {}


def test_an_answer_that_was_cut_counts_as_far_as_it_came() -> None:
    cut = Record(0, "m", 0.0, first_s=1.0, last_s=2.0, gaps_s=[0.5, 0.5], error="timeout")
    assert stream_beside._answered([cut]) == [cut]
    found = stream_beside._streamed(cut, 6e9)
    assert found == {"tokens": 3, "cut": True, "streamed_gb_per_token": 2.0}


@pytest.mark.parametrize("error", ["http 503", "timeout"])
def test_a_request_without_an_answer_is_an_error(error: str) -> None:
    with pytest.raises(ValueError, match=error):
        stream_beside._answered([Record(0, "m", 0.0, error=error)])
