"""What is copied into lent memory: never over budget, the hottest first, and it settles."""

from collections.abc import Hashable

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.policy.weights.lending import Lending


def drain(policy: Lending, now: float) -> list[Hashable]:
    keys: list[Hashable] = []
    while (turn := policy.next(now)) is not None:
        keys.append(turn.key)
    return keys


def pieces(model: str, count: int, size: int = 1) -> dict[Hashable, int]:
    return {(model, i): size for i in range(count)}


def test_the_hottest_model_comes_first_and_the_others_fill_the_room() -> None:
    policy = Lending(5)
    for model in "abc":
        policy.add(model, pieces(model, 2))
    policy.used("b", 0.0)
    policy.used("c", 0.0)
    policy.used("c", 0.1)
    assert drain(policy, 1.0) == [("c", 0), ("c", 1), ("b", 0), ("b", 1), ("a", 0)]
    assert policy.next(1.0) is None


def test_a_model_that_gets_hot_takes_the_place_of_a_cold_one() -> None:
    policy = Lending(2)
    policy.add("old", pieces("old", 2))
    assert drain(policy, 0.0) == [("old", 0), ("old", 1)]
    policy.add("new", pieces("new", 2))
    assert policy.next(0.0) is None, "as cold as the other"
    policy.used("new", 1.0)
    turn = policy.next(1.0)
    assert turn is not None
    assert (turn.key, turn.victims) == (("new", 0), (("old", 0),))
    assert drain(policy, 1.0) == [("new", 1)]
    assert policy.remove("new") == (("new", 0), ("new", 1))
    assert drain(policy, 1.0) == [("old", 0), ("old", 1)], "back where there is room again"


def test_what_found_no_place_waits_until_something_has_gone() -> None:
    policy = Lending(4)
    policy.add("a", pieces("a", 2))
    policy.add("b", pieces("b", 1, size=2))
    drain(policy, 0.0)
    policy.refuse(("b", 0))
    assert policy.next(0.0) is None
    policy.remove("a")
    assert drain(policy, 0.0) == [("b", 0)]


ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove", "next", "refuse"]), st.sampled_from("abcd")),
    max_size=120,
)


@settings(max_examples=examples(150), deadline=None)
@given(ACTS, st.integers(1, 12))
def test_books_agree_with_what_was_said(acts: list[tuple[str, str]], budget: int) -> None:
    policy, there = Lending(budget), dict[Hashable, int]()
    added: dict[str, dict[Hashable, int]] = {}
    for now, (act, model) in enumerate(acts):
        if act == "add" and model not in added:
            added[model] = pieces(model, 3, 1 + "abcd".index(model))
            policy.add(model, added[model])
        elif act == "use":
            policy.used(model, float(now))
        elif act == "remove":
            added.pop(model, None)
            gone = policy.remove(model)
            assert sorted(map(str, gone)) == sorted(str(k) for k in there if k[0] == model)
            for key in gone:
                del there[key]
        elif (turn := policy.next(float(now))) is not None:
            for victim in turn.victims:
                del there[victim]
            assert turn.key not in there
            there[turn.key] = added[turn.model][turn.key]
            if act == "refuse":
                policy.refuse(turn.key)
                del there[turn.key]
        assert sum(there.values()) <= budget
