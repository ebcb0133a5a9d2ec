"""Whatever happens, invariants hold: they are asserted by the world itself at every step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import check_end, world

from c2cserve.policy.presets import PRESETS
from c2cserve.sim.report import report


@pytest.mark.parametrize("seed", range(50))
def test_random_worlds_keep_their_invariants(seed: int) -> None:
    simulation = world(seed)
    simulation.run()
    check_end(simulation)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@given(st.integers(0, 10**9))
@settings(max_examples=1000, deadline=None)
def test_a_thousand_random_worlds_keep_their_invariants(seed: int) -> None:
    simulation = world(seed)
    simulation.run()
    check_end(simulation)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_equal_seeds_give_equal_runs(preset: str) -> None:
    reports = []
    for _ in range(2):
        simulation = world(7, preset)
        simulation.run()
        check_end(simulation)
        reports.append(report(simulation).as_json())
    assert reports[0] == reports[1]


def test_other_seeds_give_other_runs() -> None:
    ends = set()
    for seed in range(3):
        simulation = world(seed)
        simulation.run()
        ends.add(simulation.timeline.now)
    assert len(ends) == 3
