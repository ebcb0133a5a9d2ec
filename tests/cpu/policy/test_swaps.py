from random import Random

from hypothesis import given
from hypothesis import strategies as st

from c2cserve.policy.swaps import MARGIN_S, Swap, Swaps

INF = float("inf")


def test_what_fits_comes_at_once_and_one_at_a_time() -> None:
    swaps = Swaps(20, 10.0)
    assert swaps.next({"a": 10, "b": 10}, {"a": 9.0, "b": 8.0}, set(), 0.0) == Swap("b", ())
    assert not swaps.has("b"), "it is on its way"
    assert swaps.next({"a": 10}, {"a": 9.0}, set(), 0.0) is None
    swaps.arrived()
    assert swaps.has("b")
    assert swaps.next({"a": 10}, {"a": 9.0}, set(), 0.0) == Swap("a", ())


def full() -> Swaps:
    swaps = Swaps(20, 10.0)
    for name in "ab":
        assert swaps.next({name: 10}, {}, set(), 0.0) == Swap(name, ())
        swaps.arrived()
    return swaps


def test_who_has_most_headroom_leaves_once_somebody_needs_to_come() -> None:
    due_s = {"a": 20.0, "b": 30.0, "c": 10.0}
    assert full().next({"c": 10}, due_s, set(), 0.0) is None, "it can wait for another 7 s"
    assert full().next({"c": 10}, due_s, set(), 7.5) == Swap("c", ("b",))
    assert full().next({"c": 10}, due_s, {"b"}, 7.5) == Swap("c", ("a",)), "b computes"


def test_nobody_as_urgent_leaves_and_the_unused_leave_first() -> None:
    swaps = full()
    close = 1.0 + MARGIN_S / 2
    assert swaps.next({"c": 10}, {"a": close, "b": close, "c": 1.0}, set(), 0.0) is None
    assert swaps.next({"c": 10}, {"b": 99.0, "c": 1.0}, set(), 0.0) == Swap("c", ("a",))


def test_the_late_come_last_but_are_not_held_up_by_who_can_wait() -> None:
    due_s = {"a": 50.0, "b": 51.0, "late": -5.0, "near": 2.0, "far": 40.0}
    assert full().next({"late": 10, "near": 10}, due_s, set(), 0.0) == Swap("near", ("b",))
    assert full().next({"late": 10, "far": 10}, due_s, set(), 0.0) == Swap("late", ("b",))


@given(st.integers(0, 10**6))
def test_memory_is_never_exceeded_and_books_are_exact(seed: int) -> None:
    random = Random(seed)
    swaps, here = Swaps(30, 10.0), dict[str, int]()
    sizes = {name: random.randint(1, 15) for name in "abcdef"}
    for now in range(60):
        due_s = {name: now + random.uniform(-3, 20) for name in sizes if random.random() < 0.8}
        busy = {name for name in here if random.random() < 0.3}
        wanted = {name: sizes[name] for name in due_s if not swaps.has(name)}
        swap = swaps.next(wanted, due_s, busy, float(now))
        if swap is not None:
            assert not busy & set(swap.leaving)
            for name in swap.leaving:
                assert due_s.get(name, INF) >= due_s[swap.model] + MARGIN_S
                del here[name]
            here[swap.model] = sizes[swap.model]
        if swaps.coming is not None and random.random() < 0.7:
            swaps.arrived()
        assert swaps.used_bytes == sum(here.values()) <= 30
