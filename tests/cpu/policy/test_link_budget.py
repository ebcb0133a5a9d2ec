"""Links are never promised twice, and large models keep apart."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.policy.link_budget import LinkBudget, feasible_set, lightest, link_demand, spread

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


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60))))
def test_books_agree_with_what_was_said(rate: int, changes: list[tuple[int, int]]) -> None:
    budget, held = LinkBudget(rate), dict[int, int]()
    for key, demand in changes:
        others = sum(held.values()) - held.get(key, 0)
        assert budget.fits(demand, key) == (others + demand <= rate)
        assert budget.fits(demand) == (sum(held.values()) + demand <= rate)
        if demand:
            budget.hold(key, demand)
            held[key] = demand
        else:
            budget.release(key)
            held.pop(key, None)
        assert budget.used_bytes_per_s == sum(held.values())
        assert budget.load == sum(held.values()) / rate
        assert (key in budget) == (key in held)


def test_without_a_link_everything_fits() -> None:
    budget = LinkBudget(0.0)
    budget.hold("m", 10**15)
    assert budget.fits(10**15)
    assert budget.load == 0.0


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 200))
def test_a_feasible_set_fits_and_nobody_else_would(demands: list[int], rate: int) -> None:
    named = [(f"m{i}", demand) for i, demand in enumerate(demands)]
    active = feasible_set(named, rate)
    used = sum(demand for name, demand in named if name in active)
    assert used <= rate
    assert all(used + demand > rate for name, demand in named if name not in active)


def test_who_is_preferred_is_active_first() -> None:
    assert feasible_set([("a", 60), ("b", 50), ("c", 40)], 100) == ["a", "c"]


def test_a_newcomer_goes_where_least_is_streamed() -> None:
    assert lightest({"x": [10, 10], "y": [15], "z": [15]}) == "y"
    with pytest.raises(ValueError, match="empty"):
        lightest({})


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 100), max_size=12),
    st.dictionaries(st.sampled_from("xyz"), st.integers(0, 6), max_size=3),
)
def test_pairing_keeps_the_large_ones_apart(
    footprints: dict[str, int], places: dict[str, int]
) -> None:
    pairing = spread(footprints, places)
    assert len(pairing) == min(len(footprints), sum(places.values()))
    for link, most in places.items():
        assert list(pairing.values()).count(link) <= most
    assert all(
        footprints[out] <= footprints[model]
        for out in footprints.keys() - pairing.keys() for model in pairing
    )  # fmt: skip
    largest = sorted(footprints, key=lambda name: (-footprints[name], name))
    roomy = sum(count > 0 for count in places.values())
    assert len({pairing[model] for model in largest[:roomy]}) == min(roomy, len(footprints))


@given(st.lists(st.integers(1, 100), max_size=20))
def test_with_room_everywhere_loads_differ_by_one_model_at_most(sizes: list[int]) -> None:
    footprints = {f"m{i}": size for i, size in enumerate(sizes)}
    pairing = spread(footprints, dict.fromkeys("xyz", len(sizes)))
    streamed = {
        link: [footprints[m] for m, at in pairing.items() if at == link] for link in "xyz"
    }  # fmt: skip
    for a in streamed.values():
        for b in streamed.values():
            assert sum(a) - min(a, default=0) <= sum(b)
