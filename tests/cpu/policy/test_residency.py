"""HBM as a cache of weights: never over budget, never at a hotter model's expense, no thrashing."""

from collections.abc import Hashable

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.policy.weights.hbm_residency import HALF_LIFE_S, MARGIN, Residency

MODELS = st.sampled_from("abcd")
USES = st.lists(
    st.tuples(MODELS, st.integers(0, 9), st.floats(0.001, 20.0)), min_size=1, max_size=200
)


@settings(max_examples=examples(200), deadline=None)
@given(USES, st.integers(1, 60), st.data())
def test_books_agree_with_what_was_said(
    uses: list[tuple[str, int, float]], budget: int, data: st.DataObject
) -> None:
    policy, kept, now = Residency(budget), dict[Hashable, int](), 0.0
    for model, layer, wait in uses:
        now += wait
        policy.used(model, now)
        key = (model, layer)
        gone = policy.admit(model, key, 3 + layer, now)
        if gone is not None:
            assert key not in kept
            assert not any(victim[0] == model for victim in gone if isinstance(victim, tuple))
            for victim in gone:
                del kept[victim]
            kept[key] = 3 + layer
        if data.draw(st.integers(0, 9)) == 0:
            for victim in policy.shrink(data.draw(st.integers(0, 60))):
                del kept[victim]
        assert policy.used_bytes == sum(kept.values()) <= max(policy.budget_bytes, 0)
    for model in "abcd":
        mine = {key for key in kept if isinstance(key, tuple) and key[0] == model}
        assert policy.resident_bytes(model) == sum(kept[key] for key in mine)
        assert set(policy.forget(model)) == mine
    assert policy.used_bytes == 0


def run(policy: Residency, model: str, layers: int, now: float) -> tuple[int, int]:
    """One step over weights of 10 bytes: how many were taken in, how many had to go."""
    policy.used(model, now)
    answers = [policy.admit(model, (model, i), 10, now) for i in range(layers)]
    taken = [gone for gone in answers if gone is not None]
    return len(taken), sum(map(len, taken))


def test_a_model_larger_than_the_cache_keeps_what_it_has() -> None:
    policy = Residency(100)
    assert run(policy, "a", 30, 0.0) == (10, 0)
    assert [run(policy, "a", 30, t) for t in (1.0, 2.0, 3.0)] == [(0, 0)] * 3


def test_models_of_like_traffic_leave_each_other_alone() -> None:
    policy = Residency(100)
    moves = [run(policy, model, 10, t * 0.5) for t in range(200) for model in "ab"]
    assert sum(gone for _, gone in moves[2:]) == 0


def test_the_cache_follows_the_traffic() -> None:
    policy = Residency(100)
    for t in range(50):
        run(policy, "old", 10, float(t))
    assert policy.resident_bytes("old") == 100
    for t in range(50, 50 + int(4 * HALF_LIFE_S)):
        run(policy, "new", 10, float(t))
    assert (policy.resident_bytes("old"), policy.resident_bytes("new")) == (0, 100)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_nothing_goes_for_a_model_that_is_not_clearly_worth_more(a: int, b: int) -> None:
    policy = Residency(100)
    for _ in range(a):
        policy.used("a", 0.0)
    for i in range(10):
        policy.admit("a", i, 10, 0.0)
    for _ in range(b):
        policy.used("b", 0.0)
    gone = policy.admit("b", "w", 10, 0.0)
    assert (gone is not None) == (b > a * MARGIN)


def test_priority_weighs_traffic() -> None:
    policy = Residency(10)
    policy.used("a", 0.0)
    policy.admit("a", "w", 10, 0.0)
    policy.used("b", 0.0, priority=1)
    assert policy.admit("b", "w", 10, 0.0) == ["w"]


def test_kv_takes_room_from_the_least_used_first() -> None:
    policy = Residency(100)
    for _ in range(3):
        policy.used("hot", 0.0)
    policy.used("cold", 0.0)
    for i in range(5):
        policy.admit("hot", ("hot", i), 10, 0.0)
        policy.admit("cold", ("cold", i), 10, 0.0)
    gone = policy.shrink(60)
    assert len(gone) == 4
    assert all(isinstance(key, tuple) and key[0] == "cold" for key in gone)
    assert policy.shrink(0)
    assert policy.used_bytes == 0
