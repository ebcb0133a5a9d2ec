"""An idle slice takes requests that would be late where they wait, and none goes back and forth."""

from dataclasses import replace
from random import Random

import pytest
from cluster_cases import request, slice_, spec
from cluster_world import ClusterTestWorld, Live
from controller_hand import Hand, dispatched
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import Activate, Dispatch, Recall
from c2cserve.core.events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Finished,
    FirstToken,
    Progressed,
    Recalled,
    SliceLost,
    SliceUp,
    StepTimes,
)
from c2cserve.policy.cluster.admission import AdmissionSettings


class QueueingWorld(ClusterTestWorld):
    """Each slice serves its requests one after another. It keeps a request that it has begun."""

    def __init__(self, seed: int, slices: int, service_s: float, kills: int) -> None:
        random = Random(seed)
        names = [f"s{i}" for i in range(slices)]
        super().__init__(
            seed, [slice_(name, random.randint(2, 16)) for name in names],
            AdmissionSettings(max_waiting=10_000, patience=0.0), service_s=service_s, load_s=0.1,
        )  # fmt: skip
        self.lines: dict[str, list[Live]] = {}
        for i in range(4):
            self.add(spec(f"m{i}"))
        for _ in range(kills):
            name, when = random.choice(names), random.uniform(0.2, 3.0)
            self.at(when, SliceLost(name, ()))
            self.at(when + random.uniform(0.01, 0.3), SliceUp(slice_(name)))

    def _serve(self, live: Live, slice_id: str, model: str) -> None:
        self.lines.setdefault(slice_id, []).append(live)
        self._next(slice_id)

    def _next(self, slice_id: str) -> None:
        line = self.lines.get(slice_id, [])
        line[:] = [one for one in line if one.slice_id == slice_id and not one.ended]
        if line and not line[0].begun:
            line[0].begun = True
            super()._serve(line[0], slice_id, line[0].request.model)

    def _happens(self, event: ClusterEvent, incarnation: int) -> ClusterEvent | None:
        if isinstance(event, SliceLost):
            self.lines.pop(event.slice_id, None)
        happens = super()._happens(event, incarnation)
        for slice_id in list(self.lines):
            self._next(slice_id)
        return happens


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 10**6), slices=st.integers(1, 4), requests=st.integers(1, 100),
    kills=st.integers(0, 2),
)  # fmt: skip
def test_nothing_is_lost_and_nothing_goes_back_and_forth(
    seed: int, slices: int, requests: int, kills: int
) -> None:
    random = Random(seed)
    world = QueueingWorld(seed, slices, random.choice([0.02, 0.2]), kills)
    for i in range(requests):
        one = request(f"r{i}", f"m{random.randrange(4)}", random.uniform(0.0, 2.0))
        world.arrive(replace(one, prompt_len=random.randint(1, 500)))
        if random.random() < 0.2:
            world.at(one.arrival_s + random.uniform(0.0, 2.0), Cancelled(one.id))
    world.run()
    assert {live.ended for live in world.jobs.values()} <= {"finished", "cancelled"}
    assert all(live.recalls <= 2 for live in world.jobs.values())
    stealing = world.policy._relocation._stealing
    assert [*stealing._asked, *stealing._recalls, *stealing._back] == []
    assert all(load.requests == 0 for load in world.policy._slices.values())


# ---- by hand ------------------------------------------------------------------------------------


def recalls(actions: object) -> set[str]:
    assert isinstance(actions, list)
    assert all(one.unstarted for one in actions if isinstance(one, Recall))
    return {one.request_id for one in actions if isinstance(one, Recall)}


@pytest.fixture
def hand() -> Hand:
    """Slice s0 has six requests that wait, s1 has one."""
    hand = Hand(slice_("s0"), models="ab")
    hand.arrive("r0", "r1", "r2", "r3", "r4")
    hand.tell(SliceUp(slice_("s1")))
    assert dispatched(hand.arrive("other", model="b")) == {"other": "s1"}
    return hand


def test_an_idle_slice_takes_half_of_the_late_ones(hand: Hand) -> None:
    hand.now = 0.5
    assert recalls(hand.tell(Finished("other", 1))) == set(), "all may be in time"
    assert hand.policy.wakeup == 1.0
    hand.now = 1.0
    asked = recalls(hand.tell())
    assert asked == {"r0", "r1", "r2"}
    assert recalls(hand.tell()) == set(), "each is asked for once"
    back = [Recalled(request(name)) for name in sorted(asked)]
    assert hand.tell(*back) == [
        Activate("a", "s1"),
        *(Dispatch(one, "s1") for one in sorted(asked)),
    ]
    assert hand.policy.wakeup is None


def test_requests_that_have_begun_stay(hand: Hand) -> None:
    hand.now = 1.0
    hand.tell(*(FirstToken(f"r{i}", 0.9) for i in range(4)))
    assert recalls(hand.tell(Finished("other", 1))) == {"r4"}
    assert recalls(hand.tell(FirstToken("r4", 1.1))) == set(), "its slice has kept it"
    assert dispatched(hand.arrive("new", model="b")) == {"new": "s1"}


def test_a_request_without_a_place_in_the_batch_need_not_be_late_first(hand: Hand) -> None:
    hand.now = 0.5
    hand.tell(*(FirstToken(f"r{i}", 0.4) for i in range(4)))
    assert recalls(hand.tell(Finished("other", 1))) == {"r4"}


def test_what_is_believed_of_times_foretells_who_will_be_late(hand: Hand) -> None:
    hand.tell(StepTimes("s0", "a", 0.01, 0.028))
    assert recalls(hand.tell(Finished("other", 1))) == {"r3", "r4"}, "10 tokens take 0.28 s"


def test_a_request_that_has_its_slice_to_itself_stays() -> None:
    hand = Hand(slice_("s0"), slice_("s1"))
    hand.arrive("r1")
    hand.now = 100.0
    assert hand.tell() == []
    assert hand.policy.wakeup is None


def test_a_request_that_was_placed_again_has_begun_when_it_makes_progress(hand: Hand) -> None:
    displaced = tuple(replace(request(f"r{i}"), sent=3) for i in range(5))
    hand.tell(SliceLost("s0", displaced))
    hand.tell(SliceUp(slice_("s0")))
    hand.now = 9.0
    hand.tell(*(Progressed(f"r{i}", 8.0) for i in range(5)))
    where = {name: slice_id for name, (_, slice_id) in hand.policy._where.items()}
    assert set(where.values()) <= {"s0", "s1"}
    actions = hand.tell(*(Finished(name, 1) for name, at in where.items() if at == "s1"))
    assert recalls(actions) == set()


@pytest.mark.parametrize("race", ["finished", "cancelled", "lost", "target lost"])
def test_a_recall_may_race_with_anything(hand: Hand, race: str) -> None:
    hand.now = 2.0
    asked = sorted(recalls(hand.tell(Finished("other", 1))))
    match race:
        case "finished":
            hand.tell(*(Finished(name, 3) for name in asked))
        case "cancelled":
            hand.tell(*(Cancelled(name) for name in asked))
        case "lost":
            left = tuple(request(f"r{i}") for i in range(5))
            placed = dispatched(hand.tell(SliceLost("s0", left)))
            assert set(placed) == {f"r{i}" for i in range(5)}
            assert set(placed.values()) == {"s1"}
        case _:
            hand.tell(SliceLost("s1", ()))
            placed = dispatched(hand.tell(*(Recalled(request(name)) for name in asked)))
            assert placed == dict.fromkeys(asked, "s0")
    for name in list(hand.policy._where):
        hand.tell(Finished(name, 1))
    stealing = hand.policy._relocation._stealing
    assert [*stealing._asked, *stealing._recalls, *stealing._back] == []
    assert all(load.requests == 0 for load in hand.policy._slices.values())


def test_newcomers_go_before_stolen_work() -> None:
    hand = Hand(slice_("s0"), models="ab")
    hand.arrive("r0", "r1", "r2")
    hand.now = 5.0
    assert dispatched(hand.tell(SliceUp(slice_("s1")), Arrived(request("new", "b", 5.0)))) == {
        "new": "s1"
    }
