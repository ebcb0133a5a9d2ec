"""A simulated server whose event loop has costs, at many times the load that it can hold."""

import sys
from pathlib import Path

import pytest
from example_counts import few

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from overload_simulated import KINDS, simulate

_CAPACITY_PER_S = 20.0
"""What the simulated machine can do, about."""
_SECONDS = few(12, 9)


@pytest.fixture(scope="module")
def best_per_s() -> float:
    return max(
        simulate("open", load * _CAPACITY_PER_S, _SECONDS, 0)["met_per_s"] for load in (1.0, 2.0)
    )


@pytest.mark.parametrize("kind", KINDS[:2])
def test_goodput_holds_at_four_times_the_load(kind: str, best_per_s: float) -> None:
    """Few seconds and one seed: the bound leaves room for chance. `benchmarks/overload_simulated`
    has more of both, and a tighter one."""
    row = simulate(kind, 4.0 * _CAPACITY_PER_S, _SECONDS, 1)
    assert row["met_per_s"] >= 0.85 * best_per_s
    assert row["late_per_s"] <= 0.05 * best_per_s
    assert row["refusal_p99_ms"] < 100.0


def test_stalls_of_the_event_loop_make_few_late() -> None:
    row = simulate("open", 4.0 * _CAPACITY_PER_S, _SECONDS, 2, stall_s=0.1)
    assert row["late_per_s"] <= 0.1 * row["met_per_s"]
