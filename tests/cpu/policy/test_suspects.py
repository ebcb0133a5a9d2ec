"""Requests that kill their workers are found after few deaths, and only they are refused."""

from dataclasses import replace
from math import ceil, log2
from random import Random

import pytest
from cluster_cases import request, slice_, spec
from cluster_world import ClusterTestWorld, Live
from controller_hand import Hand, dispatched, rejects
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import Reject
from c2cserve.core.events import (
    Cancelled,
    ClusterEvent,
    Finished,
    InstanceFailed,
    Progressed,
    SliceLost,
    SliceUp,
)
from c2cserve.core.machine import Slice
from c2cserve.core.request import Request
from c2cserve.policy.cluster.admission import AdmissionSettings

BACK_S = 0.2


class PoisonWorld(ClusterTestWorld):
    """Requests named `p...` kill the worker that they are on, before they make progress. A slice
    that was lost is up again a moment later."""

    def __init__(self, seed: int, slices: list[Slice], models: int) -> None:
        patient = AdmissionSettings(max_waiting=10_000, patience=0.0)
        super().__init__(seed, slices, patient, load_s=0.1)
        self.names = [f"m{i}" for i in range(models)]
        for name in self.names:
            self.add(spec(name))
        self.kills: dict[int, tuple[str, int]] = {}
        self.deaths = 0
        self.most = 1
        """Requests on a slice at a time."""

    def _serve(self, live: Live, slice_id: str, model: str) -> None:
        self.most = max(self.most, len(self.slices[slice_id].running))
        if not live.request.id.startswith("p"):
            super()._serve(live, slice_id, model)
            return
        kill = len(self.kills) + 1
        self.kills[kill] = live.request.id, live.incarnation
        later = self.now + self.random.uniform(0.0, 2 * self.service_s)
        self.at(later, SliceLost(slice_id, ()), kill)

    def _happens(self, event: ClusterEvent, incarnation: int) -> ClusterEvent | None:
        if isinstance(event, SliceLost) and event.slice_id in self.slices:
            if incarnation:
                live = self.jobs[self.kills[incarnation][0]]
                if live.ended or live.incarnation != self.kills[incarnation][1]:
                    return None
                self.deaths += 1
            self.at(self.now + BACK_S, SliceUp(self.slices[event.slice_id].slice))
        return super()._happens(event, incarnation)

    def kill(self, when: float, slice_id: str) -> None:
        """An operator does."""
        self.at(when, SliceLost(slice_id, ()))

    def of(self, kind: str) -> list[Live]:
        return [live for live in self.jobs.values() if live.request.id.startswith(kind)]


def poisoned(seed: int, innocents: int, poisons: int) -> PoisonWorld:
    random = Random(seed)
    slices = [
        slice_(f"s{i}", random.randint(2, 32), random.randint(1, 6))
        for i in range(random.randint(1, 4))
    ]
    world = PoisonWorld(seed, slices, random.randint(1, 10))
    spread_s = random.choice([0.0, 0.3, 3.0])
    names = [*(f"r{i}" for i in range(innocents)), *(f"p{i}" for i in range(poisons))]
    for name in names:
        one = request(name, random.choice(world.names), random.uniform(0.0, spread_s))
        world.arrive(replace(one, prompt_len=random.randint(1, 99)))
        if name[0] == "r" and random.random() < 0.1:
            world.at(one.arrival_s + random.uniform(0.0, 2.0), Cancelled(one.id))
    return world


def settled(world: PoisonWorld) -> None:
    """Only the poisonous requests were refused, and nothing is left in any book."""
    assert {live.ended for live in world.of("r")} <= {"finished", "cancelled"}
    for live in world.of("p"):
        assert live.reject is not None
        assert live.reject.status == 500
        assert "workers died" in live.reject.reason
    policy = world.policy
    assert not policy._relocation.held
    assert not policy._relocation._suspects._records
    assert not policy._relocation._suspects._trials
    assert not policy._relocation._stealing._recalls
    assert not policy._queue
    assert all(model.running == 0 for model in policy._models.values())
    assert all(load.requests == 0 for load in policy._slices.values())


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 10**6), innocents=st.integers(0, 80))
def test_one_poisonous_request_is_found_after_few_deaths(seed: int, innocents: int) -> None:
    world = poisoned(seed, innocents, 1)
    world.run()
    settled(world)
    assert 4 <= world.deaths <= 4 + ceil(log2(world.most))


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 10**6), innocents=st.integers(0, 60), poisons=st.integers(2, 5),
    kills=st.integers(0, 1),
)  # fmt: skip
def test_several_are_found_while_an_operator_kills_a_worker(
    seed: int, innocents: int, poisons: int, kills: int
) -> None:
    world = poisoned(seed, innocents, poisons)
    for _ in range(kills):
        world.kill(world.random.uniform(0.0, 3.0), "s0")
    world.run()
    settled(world)
    assert world.deaths <= poisons * (5 + ceil(log2(world.most)))


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 10**6), requests=st.integers(1, 60), kills=st.integers(1, 3))
def test_kills_from_outside_refuse_nothing(seed: int, requests: int, kills: int) -> None:
    world = poisoned(seed, requests, 0)
    for _ in range(kills):
        world.kill(world.random.uniform(0.0, 1.0), f"s{world.random.randrange(2)}")
    world.run()
    settled(world)


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_kills_between_which_requests_get_on_refuse_nothing(seed: int) -> None:
    """However many there are. Each request is the only one of its slice."""
    random = Random(seed)
    world = PoisonWorld(seed, [slice_("s0", 1, 1)], 1)
    world.service_s = 0.01
    for i in range(20):
        at = float(i)
        world.arrive(request(f"r{i}", "m0", at))
        world.kill(at + random.uniform(0.0, 0.5), "s0")
    world.run()
    settled(world)


def test_decisions_repeat_exactly() -> None:
    worlds = [poisoned(7, 40, 2) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].log == worlds[1].log


# ---- by hand ------------------------------------------------------------------------------------


def lose(hand: Hand, slice_id: str, *names: str) -> list[object]:
    """The slice is lost with these requests and is up again at once."""
    requests = tuple(request(name, "a", 0.0) for name in names)
    hand.tell(SliceLost(slice_id, requests))
    return list(hand.tell(SliceUp(slice_(slice_id, 16))))


@pytest.fixture
def hand() -> Hand:
    return Hand(slice_("s0", 16))


def test_after_one_death_all_are_placed_again(hand: Hand) -> None:
    hand.arrive("r1", "r2", "r3", "r4")
    assert set(dispatched(lose(hand, "s0", "r1", "r2", "r3", "r4"))) == {"r1", "r2", "r3", "r4"}


def test_after_two_they_run_by_halves_and_newcomers_wait(hand: Hand) -> None:
    hand.arrive("r1", "r2", "r3", "r4")
    lose(hand, "s0", "r1", "r2", "r3", "r4")
    assert set(dispatched(lose(hand, "s0", "r1", "r2", "r3", "r4"))) == {"r1", "r2"}
    assert hand.arrive("new") == []
    assert hand.tell(Progressed("r1", 1.0)) == []
    assert set(dispatched(hand.tell(Progressed("r2", 1.0)))) == {"r3", "r4"}, "beside the cleared"
    assert hand.arrive("newer") == []
    assert hand.tell(Finished("r3", 3)) == []
    assert set(dispatched(hand.tell(Cancelled("r4")))) == {"new", "newer"}, "isolation has ended"


def test_progress_between_two_deaths_clears(hand: Hand) -> None:
    hand.arrive("r1", "r2")
    lose(hand, "s0", "r1", "r2")
    hand.tell(Progressed("r1", 1.0), Progressed("r2", 1.0))
    assert set(dispatched(lose(hand, "s0", "r1", "r2"))) == {"r1", "r2"}


def test_requests_that_were_cleared_are_not_charged_for_those_on_trial(hand: Hand) -> None:
    hand.arrive("r1", "r2")
    lose(hand, "s0", "r1", "r2")
    assert set(dispatched(lose(hand, "s0", "r1", "r2"))) == {"r1"}
    assert set(dispatched(hand.tell(Progressed("r1", 1.0)))) == {"r2"}
    assert set(dispatched(lose(hand, "s0", "r1", "r2"))) == {"r2"}, "quite alone"
    assert set(dispatched(lose(hand, "s0", "r2"))) == {"r2"}
    actions = hand.tell(SliceLost("s0", (request("r2", "a", 0.0),)))
    assert rejects(actions) == {"r2": 500}
    [refusal] = [one for one in actions if isinstance(one, Reject)]
    assert refusal.reason == (
        "5 workers died while they ran this request, 2 of them while they ran no other"
    )
    assert set(dispatched(hand.tell(SliceUp(slice_("s0", 16))))) == {"r1"}


def test_halves_run_on_several_slices_at_once_and_elsewhere_than_before(hand: Hand) -> None:
    hand.arrive("r1", "r2")
    lose(hand, "s0", "r1", "r2")
    hand.tell(SliceLost("s0", tuple(request(name, "a", 0.0) for name in ("r1", "r2"))))
    both = hand.tell(SliceUp(slice_("s0", 16)), SliceUp(slice_("s1", 16)))
    assert dispatched(both) == {"r1": "s1", "r2": "s0"}


def test_without_an_empty_slice_one_is_closed_until_it_is() -> None:
    hand = Hand(slice_("s0", 16), models="ab")
    hand.arrive("r1", "r2")
    lose(hand, "s0", "r1", "r2")
    hand.tell(SliceUp(slice_("s1", 16)))
    assert dispatched(hand.arrive("busy", model="b")) == {"busy": "s1"}
    hand.tell(SliceLost("s0", tuple(request(name, "a", 0.0) for name in ("r1", "r2"))))
    assert dispatched(hand.arrive("early", model="b")) == {"early": "s1"}
    assert hand.policy.wakeup == 5.0
    hand.now = 5.0
    assert hand.tell() == []
    assert hand.policy.wakeup is None
    assert hand.arrive("late", model="b") == []
    assert hand.tell(Finished("early", 1)) == []
    assert set(dispatched(hand.tell(Finished("busy", 1)))) == {"r1"}
    assert set(dispatched(hand.tell(Progressed("r1", 1.0)))) == {"r2"}
    assert set(dispatched(hand.tell(Progressed("r2", 1.0)))) == {"late"}


def test_a_slice_that_is_replaced_blames_no_request(hand: Hand) -> None:
    hand.arrive("r1")
    one: tuple[Request, ...] = (request("r1", "a", 0.0),)
    for _ in range(8):
        hand.tell(InstanceFailed("s0", "a", "broken", False))
        hand.tell(InstanceFailed("s0", "a", "broken", False))
        assert rejects(hand.tell(SliceLost("s0", one))) == {}
        hand.now += 100.0
        assert dispatched(hand.tell(SliceUp(slice_("s0", 16)))) == {"r1": "s0"}


def test_isolated_requests_are_refused_with_the_others_while_no_slice_comes_up(hand: Hand) -> None:
    hand.arrive("r1", "r2")
    lose(hand, "s0", "r1", "r2")
    hand.tell(SliceLost("s0", tuple(request(name, "a", 0.0) for name in ("r1", "r2"))))
    refused: dict[str, int] = {}
    for _ in range(200):
        if hand.policy.wakeup is None:
            break
        hand.now = max(hand.now + 0.01, hand.policy.wakeup)
        refused |= rejects(hand.tell())
    assert refused == {"r1": 503, "r2": 503}
    assert 30.0 <= hand.now < 32.0
