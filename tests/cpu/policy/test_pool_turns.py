"""A model outside of a pool that is full of models in use gets its turn."""

from itertools import count

import pytest
from cluster_cases import request, slice_, spec
from cluster_world import ClusterTestWorld
from controller_hand import Hand, dispatched
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import Deactivate, Dispatch, Evict, Load, Reject
from c2cserve.core.events import Cancelled, Finished, ModelAdded, ModelLoaded, ModelUsable
from c2cserve.policy.cluster.admission import AdmissionSettings


def full(*sizes: int, outside: int = 10, budget: int | None = None) -> Hand:
    """Models a, b, ... in the pool, each with a request that runs; `new` does not fit."""
    names = "abcdef"[: len(sizes)]
    hand = Hand(slice_(max_batch=9), models="", budget=budget or sum(sizes))
    for name, size in zip(names, sizes, strict=True):
        hand.ready(spec(name, size))
        assert dispatched(hand.arrive(f"{name}0", model=name))
    hand.tell(ModelAdded(spec("new", outside)))
    return hand


def loaded(hand: Hand, name: str, size: int = 10) -> None:
    hand.tell(ModelUsable(name), ModelLoaded(name, size, 1.0))


def test_a_model_in_use_is_closed_for_one_that_is_overdue_and_leaves() -> None:
    hand = full(10)
    assert hand.arrive("n", model="new") == []
    hand.now = 0.9
    assert dispatched(hand.arrive("a1")), "the other one's request can still be in time"
    hand.now = 1.5
    hand.tell()
    assert hand.arrive("a2") == [], "it is closed now"
    assert hand.tell(Finished("a0", 1)) == []
    assert hand.tell(Finished("a1", 1)) == [Deactivate("a", "s0"), Evict("a"), Load("new")]
    hand.now = 2.0
    assert dispatched(hand.tell(ModelUsable("new"), ModelLoaded("new", 10, 0.5))) == {"n": "s0"}


def test_it_comes_back_in_the_same_way() -> None:
    hand = full(10)
    hand.arrive("n", model="new")
    hand.now = 1.5
    hand.tell()
    hand.arrive("a1")
    hand.tell(Finished("a0", 1))
    hand.now = 2.5
    loaded(hand, "new")
    hand.now = 3.0
    assert dispatched(hand.arrive("n1", model="new")), "a stays outside while new's stay is short"
    hand.now = 4.0
    hand.tell()
    assert hand.arrive("n2", model="new") == []
    assert hand.tell(Finished("n", 1)) == []
    assert Load("a") in hand.tell(Finished("n1", 1))


def test_nothing_is_closed_while_a_model_without_requests_can_leave() -> None:
    hand = full(10, 10)
    hand.tell(Finished("b0", 1))
    assert [Evict("b"), Load("new")] == hand.arrive("n", model="new")[-2:]
    hand.now = 5.0
    assert dispatched(hand.arrive("a1"))


def test_the_model_that_is_used_least_often_is_closed() -> None:
    hand = full(10, 10)
    for number in range(1, 5):
        hand.now = number * 0.1
        hand.arrive(f"b{number}", model="b")
    hand.arrive("n", model="new")
    hand.now = 2.0
    hand.tell()
    assert hand.arrive("a1") == []
    assert dispatched(hand.arrive("b9", model="b"))


def test_as_many_are_closed_as_it_takes() -> None:
    hand = full(30, 10, 10, outside=20)
    hand.arrive("n", model="new")
    hand.now = 2.0
    hand.tell()
    assert [len(dispatched(hand.arrive(f"{name}1", model=name))) for name in "abc"] == [0, 1, 1]
    hand = full(10, 10, 10, outside=20)
    hand.arrive("n", model="new")
    hand.now = 2.0
    hand.tell()
    assert [len(dispatched(hand.arrive(f"{name}1", model=name))) for name in "abc"] == [0, 0, 1]


def test_they_are_open_again_when_the_request_has_gone() -> None:
    hand = full(10)
    hand.arrive("n", model="new")
    hand.now = 1.5
    hand.tell()
    assert hand.arrive("a1") == []
    assert dispatched(hand.tell(Cancelled("n"))) == {"a1": "s0"}


def test_what_was_closed_for_one_is_not_taken_by_another() -> None:
    hand = full(10, 10, outside=20)
    hand.arrive("n", model="new")
    hand.now = 2.0
    hand.tell()
    hand.tell(ModelAdded(spec("small", 10)))
    assert hand.arrive("x", model="small") == []
    assert hand.tell(Finished("a0", 1)) == [], "small would fit in a's place"
    assert Load("new") in hand.tell(Finished("b0", 1))


def test_pinned_models_are_not_closed() -> None:
    hand = Hand(slice_(), models="", budget=25)
    hand.ready(spec("a", pinned=True))
    hand.ready(spec("b"))
    hand.arrive("a0")
    hand.arrive("b1", model="b")
    hand.tell(ModelAdded(spec("new")))
    hand.arrive("n", model="new")
    hand.now = 2.0
    hand.tell()
    assert dispatched(hand.arrive("a1"))
    assert hand.arrive("b2", model="b") == []


def test_requests_that_wait_for_a_closed_model_are_no_overload() -> None:
    hand = full(10)
    hand.arrive("n", model="new")
    hand.now = 1.5
    hand.tell()
    for number in range(40):
        hand.now = 1.5 + number * 0.1
        actions = hand.arrive(f"a{number + 1}", model="a")
        assert not [one for one in actions if isinstance(one, Reject)]


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 30), busy=st.integers(1, 5), quiet=st.integers(1, 4),
    sizes=st.lists(st.integers(5, 30), min_size=9, max_size=9),
)  # fmt: skip
def test_no_model_starves(seed: int, busy: int, quiet: int, sizes: list[int]) -> None:
    """Some models are asked for without a break, others once. All of these are served, however
    small the pool is. The bound: overdue, then for each model before it the requests that run, a
    load, and the stay of what was just loaded."""
    names = [f"m{i}" for i in range(busy + quiet)]
    specs = [spec(name, size) for name, size in zip(names, sizes, strict=False)]
    world = ClusterTestWorld(
        seed, [slice_("s0", 64, 16), slice_("s1", 64, 16)], AdmissionSettings(patience=0.0),
        budget_bytes=max(*sizes[:len(names)], sum(one.weight_bytes for one in specs) // 2),
        service_s=0.3, load_s=0.5,
    )  # fmt: skip
    for one in specs:
        world.add(one)
    number = count()
    for step in range(600):
        for name in names[:busy]:
            at = step * 0.05
            world.arrive(request(f"r{next(number)}", name, at, 5))
    single = [request(f"q{i}", name, 2.0 + i, 5) for i, name in enumerate(names[busy:])]
    for one in single:
        world.arrive(one)
    world.run(until=1e3)
    for one in single:
        live = world.jobs[one.id]
        assert live.ended == "finished"
        assert live.first_dispatch_s is not None
        waited_s = live.first_dispatch_s - one.arrival_s
        assert waited_s < 1.25 + 6.0 * len(names), f"{one.model} waited for {waited_s:.1f} s"


@pytest.mark.parametrize("patience", [0.0, 20.0])
def test_busy_models_share_a_pool_of_one(patience: float) -> None:
    world = ClusterTestWorld(
        1, [slice_("s0", 64)], AdmissionSettings(patience=patience), budget_bytes=10,
        service_s=0.3, load_s=0.5,
    )  # fmt: skip
    for name in "ab":
        world.add(spec(name))
    for step in range(400):
        for name in "ab":
            world.arrive(request(f"{name}{step}", name, step * 0.05, 5))
    world.run()
    times = [(now, one) for now, _, actions in world.log for one in actions]
    loads = [now for now, one in times if isinstance(one, Load)]
    assert 4 <= len([now for now in loads if now < 20.0]) <= 16, "turns, and no thrashing"
    sent = dict.fromkeys("ab", 0)
    for now, one in times:
        if isinstance(one, Dispatch) and now < 20.0:
            sent[one.request_id[0]] += 1
    assert min(sent.values()) > 120, "each of them has what the other one has"
    how = {live.ended for live in world.jobs.values()}
    assert how == ({"finished", "rejected"} if patience else {"finished"})
