"""A slice gives back the requests that it is asked for: those that run only where that is meant."""

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_cases import request, requests, world_of
from slice_hand import Hand, failed, names

from c2cserve.core.actions import Return
from c2cserve.core.events import RecallAsked, Submitted, Withdrawn


@settings(max_examples=examples(100), deadline=None)
@given(
    requests, st.integers(0, 1000), st.integers(4, 24), st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.3]), st.data(),
)  # fmt: skip
def test_whenever_it_is_asked_nothing_is_lost(
    drawn: list, seed: int, slabs: int, in_flight: int, park: float, data: st.DataObject
) -> None:
    world = world_of(drawn, seed, slabs, in_flight, park, 0.0)
    asked = data.draw(st.lists(st.sampled_from(sorted(world.jobs)), max_size=6))
    for name in asked:
        later_s, running = data.draw(st.floats(0.0, 2.0)), data.draw(st.booleans())
        world.at(world.jobs[name].request.arrival_s + later_s, RecallAsked(name, running))
    world.run()
    world.check_end()
    for name, job in world.jobs.items():
        assert job.ended != "returned" or name in asked


def test_a_waiting_request_goes_and_one_that_has_begun_stays() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1")))
    assert names(step) == ["r1"]
    actions = list(hand.tell(RecallAsked("r1"), Submitted(request("r2")), RecallAsked("r2")))
    assert actions == [Return("r2")]
    assert list(hand.tell(RecallAsked("r2"), RecallAsked("unknown"))) == []
    assert names(hand.step(hand.done(step))) == ["r1"]


@pytest.mark.parametrize("first", ["withdrawn", "recalled"])
def test_it_may_be_withdrawn_at_the_same_time(first: str) -> None:
    hand = Hand()
    hand.step(Submitted(request("r1")))
    both = [Withdrawn("r2"), RecallAsked("r2")]
    actions = list(
        hand.tell(Submitted(request("r2")), *(both if first == "withdrawn" else both[::-1]))
    )
    assert [isinstance(one, Return) for one in actions] == [first == "recalled"]
    assert hand.policy.waiting == 0


def test_a_request_whose_step_failed_stays() -> None:
    """It is to run alone here; elsewhere that would not be known."""
    hand = Hand()
    step = hand.step(Submitted(request("r1")))
    hand.tell(Submitted(request("r2")))
    actions = list(hand.tell(failed(step), RecallAsked("r1")))
    assert not any(isinstance(one, Return) for one in actions)


def test_one_that_runs_comes_back_at_once_where_that_is_meant() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1")))
    assert list(hand.tell(RecallAsked("r1", running=True))) == []  # its step ends first
    assert list(hand.tell(hand.done(step))) == [Return("r1")]
    assert hand.policy.running == hand.policy.waiting == 0
    assert not hand.policy.arena.held_bytes


def test_one_that_waits_and_one_between_steps_come_back_too() -> None:
    hand = Hand("m", "n")
    step = hand.step(Submitted(request("r1")))
    waiting = hand.tell(Submitted(request("r2", "n")), RecallAsked("r2", running=True))
    assert list(waiting) == [Return("r2")]
    hand.tell(hand.done(step, finished=["r1"]))
    assert list(hand.tell(RecallAsked("r1", running=True))) == []  # it has ended
