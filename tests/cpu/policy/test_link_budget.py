"""What a stream needs of its link."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.policy.cluster.link_and_memory import link_demand

GB = 10**9
SIZES = st.integers(0, 200 * GB)
PACES = st.floats(1e-3, 10.0)


def test_the_papers_formula() -> None:
    # Llama-8B in bfloat16 at 50 ms per token takes 320 GB/s of a link, half of it resident half.
    assert link_demand(16 * GB, 0.05) == 320 * GB
    assert link_demand(16 * GB, 0.05, resident=0.5) == 160 * GB
    assert link_demand(16 * GB, 0.05, resident=1.0) == 0


@pytest.mark.parametrize(("tpot_s", "resident"), [(0.0, 0.0), (-1.0, 0.0), (0.1, 1.1), (0.1, -0.1)])
def test_demands_of_no_meaning_are_refused(tpot_s: float, resident: float) -> None:
    with pytest.raises(ValueError, match="no pace"):
        link_demand(GB, tpot_s, resident)


@given(SIZES, PACES, st.floats(0, 1), st.floats(0, 1))
def test_demand_is_enough_for_the_pace_and_falls_with_residency(
    size: int, tpot_s: float, a: float, b: float
) -> None:
    low, high = sorted((a, b))
    needed = Fraction(size) * (1 - Fraction(low)) / Fraction(tpot_s)
    assert link_demand(size, tpot_s, low) >= needed * (1 - Fraction(1, 10**12))
    assert link_demand(size, tpot_s, high) <= link_demand(size, tpot_s, low)
