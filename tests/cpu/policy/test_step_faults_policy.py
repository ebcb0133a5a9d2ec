"""Steps that raise: whose fault it is, what runs again and how, and what is given up."""

import pytest
from cluster_cases import request as asked
from cluster_cases import slice_
from cluster_cases import spec as model_of
from controller_hand import Hand as Controller
from controller_hand import dispatched, rejects
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_cases import request, requests, spec, world_of
from slice_hand import REASON, Hand, failed, names

from c2cserve.core.actions import (
    Activate,
    Deactivate,
    Dispatch,
    Drop,
    Fail,
    GiveUp,
    Recover,
    Reject,
    Replace,
    Return,
    RunStep,
    SliceAction,
)
from c2cserve.core.events import (
    Activated,
    Deactivated,
    Finished,
    InstanceFailed,
    InstanceRecovered,
    ModelRemoving,
    Returned,
    SliceLost,
    SliceUp,
    Submitted,
    Withdrawn,
)
from c2cserve.core.request import Slo
from c2cserve.core.step import Step

# ---- a slice ------------------------------------------------------------------------------------


@settings(max_examples=examples(150), deadline=None)
@given(
    requests, st.integers(0, 1000), st.integers(4, 24), st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.3]), st.sampled_from([0.02, 0.2]),
)  # fmt: skip
def test_any_faults_lose_no_token_and_no_memory(
    drawn: list, seed: int, slabs: int, in_flight: int, park: float, fault: float
) -> None:
    """The world checks each step: tokens in order, and what has failed runs alone."""
    world = world_of(drawn, seed, slabs, in_flight, park, 0.0)
    world.fault = fault
    world.run()
    world.check_end()
    for job in world.jobs.values():
        assert job.failures >= 2 or job.ended != "fault", "the first failure is tried again"
        assert job.ended != "returned" or world.given_up


@settings(max_examples=examples(100), deadline=None)
@given(
    requests, st.integers(0, 1000), st.sampled_from([1, 2]), st.sampled_from([0.0, 0.3]), st.data()
)
def test_poison_fails_alone(
    drawn: list, seed: int, in_flight: int, park: float, data: st.DataObject
) -> None:
    world = world_of(drawn, seed, 24, in_flight, park, 0.0)
    poisoned = data.draw(st.sets(st.sampled_from(sorted(world.jobs)), max_size=2))
    for name in poisoned:
        world.jobs[name].poison = True
    world.run()
    world.check_end()
    assert not world.given_up
    for name, job in world.jobs.items():
        if job.ended == "fault":
            assert name in poisoned
        elif name in poisoned:
            assert job.drawn == 0
    assert world.policy.given_up == sum(job.ended == "fault" for job in world.jobs.values())


def only_step(actions: list[SliceAction]) -> Step:
    [step] = [action.step for action in actions if isinstance(action, RunStep)]
    return step


def test_a_suspect_gets_the_room_of_a_request_that_is_cut_short() -> None:
    """No event follows that would look at it again."""
    slo = Slo(ttft_s=0.1, tpot_s=0.01)
    drawn = [
        ("a", 1, 1, 0.0, 0, 0, 1, None, slo, False), ("a", 1, 4, 1.0, 0, 0, 4, None, slo, False),
        ("c", 1, 4, 1.0, 0, 0, 4, None, slo, False), ("c", 4, 30, 1.0, 0, 0, 30, None, slo, False),
    ]  # fmt: skip
    world = world_of(drawn, 0, 4, 1, 0.0, 0.0)
    world.fault = 0.02
    world.run()
    world.check_end()


def test_the_requests_of_a_failed_step_run_alone_then_in_company() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1", new=50)), Submitted(request("r2", new=50)))
    step = hand.step(hand.done(step))
    actions = list(hand.tell(failed(step)))
    assert [a for a in actions if isinstance(a, Drop)] == [Drop("r1", True), Drop("r2", True)]
    step = only_step(actions)
    seen: list[list[str]] = []
    for _ in range(9):
        seen.append(names(step))
        step = hand.step(hand.done(step))
    assert sorted(map(tuple, seen[:8])) == [("r1",)] * 4 + [("r2",)] * 4
    assert sorted(seen[8]) == ["r1", "r2"]
    assert (hand.policy.retries, hand.policy.given_up) == (2, 0)


def test_what_fails_again_in_company_stays_alone_for_longer() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1", new=99)), Submitted(request("r2", new=99)))
    alone: list[int] = []
    for _ in range(2):
        step = only_step(list(hand.tell(failed(step))))
        alone.append(0)
        while len(step.seqs) == 1:
            alone[-1] += 1
            step = hand.step(hand.done(step))
    assert alone == [8, 128]


def test_the_second_failure_alone_ends_the_request() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1")))
    step = only_step(list(hand.tell(failed(step))))
    assert step.seqs[0].fresh
    assert list(hand.tell(failed(step))) == [Fail("r1", REASON)]
    assert hand.policy.arena.held_bytes == 0
    assert (hand.policy.retries, hand.policy.given_up) == (1, 1)


def test_a_withdrawn_request_is_not_tried_again() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1")))
    hand.tell(Withdrawn("r1"))
    assert list(hand.tell(failed(step))) == [Drop("r1")]
    assert hand.policy.arena.held_bytes == 0


def exhaust(hand: Hand, *requests_: str, model: str = "m") -> list[SliceAction]:
    """Each of these fails twice; what came of the last failure."""
    actions: list[SliceAction] = []
    for name in requests_:
        step = hand.step(Submitted(request(name, model)))
        step = only_step(list(hand.tell(failed(step))))
        actions = list(hand.tell(failed(step)))
    return actions


def test_three_in_a_row_and_the_model_is_given_up() -> None:
    hand = Hand()
    exhaust(hand, "r1", "r2")
    step = hand.step(Submitted(request("r3")))
    waiting = Submitted(request("r4", at=1.0))
    step = only_step(list(hand.tell(failed(step), waiting)))
    assert names(step) == ["r3"]
    actions = list(hand.tell(failed(step)))
    assert actions == [Fail("r3", REASON), GiveUp("m", REASON, False), Return("r4")]
    assert list(hand.tell(Submitted(request("r5")))) == [Return("r5")]


def test_a_model_that_came_back_is_given_up_by_one_failure_and_recovers_by_an_end() -> None:
    hand = Hand()
    assert GiveUp("m", REASON, False) in exhaust(hand, "r1", "r2", "r3")
    hand.tell(Deactivated("m"), Activated(spec("m")))
    assert GiveUp("m", REASON, False) in exhaust(hand, "r4")
    hand.tell(Deactivated("m"), Activated(spec("m")))
    step = hand.step(Submitted(request("r5", new=1)))
    assert list(hand.tell(hand.done(step, finished=["r5"]))) == [Recover("m")]
    assert not [a for a in exhaust(hand, "r6", "r7") if isinstance(a, GiveUp)]


def test_a_first_token_is_no_proof_and_another_models_work_is_said() -> None:
    hand = Hand("m", "n")
    exhaust(hand, "r1", "r2")
    step = hand.step(Submitted(request("r3")))
    step = hand.step(hand.done(step))
    step = only_step(list(hand.tell(failed(step))))
    step = hand.step(hand.done(step))
    assert GiveUp("m", REASON, False) in hand.tell(failed(step))
    hand = Hand("m", "n")
    exhaust(hand, "r1", "r2")
    step = hand.step(Submitted(request("other", "n", new=1)))
    hand.tell(hand.done(step, finished=["other"]))
    assert GiveUp("m", REASON, True) in exhaust(hand, "r3")


# ---- the controller -----------------------------------------------------------------------------


def give_up(slice_id: str, model: str = "a", *, others: bool = True) -> InstanceFailed:
    return InstanceFailed(slice_id, model, REASON, others)


def test_other_slices_serve_a_model_that_one_has_given_up() -> None:
    hand = Controller(slice_("s0"), slice_("s1"))
    assert dispatched(hand.arrive("r1")) == {"r1": "s0"}
    back = asked("r1", "a", 0.0)
    actions = hand.tell(give_up("s0"), Returned(back))
    assert Deactivate("a", "s0") in actions
    assert dispatched(actions) == {"r1": "s1"}
    assert dispatched(hand.arrive("r2")) == {"r2": "s1"}


def test_a_model_that_fails_on_every_slice_is_refused_for_a_while() -> None:
    hand = Controller(slice_("s0"))
    hand.arrive("r1")
    actions = hand.tell(give_up("s0"), Returned(asked("r1", "a", 0.0)))
    [reject] = [a for a in actions if isinstance(a, Reject)]
    assert (reject.status, reject.retry_after_s) == (503, 1.0)
    assert REASON in reject.reason
    hand.now = 0.9
    assert rejects(hand.arrive("r2")) == {"r2": 503}
    hand.now = 1.0
    actions = hand.arrive("r3", "r4")
    assert actions == [Activate("a", "s0"), Dispatch("r3", "s0")], "one at a time"
    actions = hand.tell(InstanceRecovered("s0", "a"))
    assert dispatched(actions) == {"r4": "s0"}


def test_back_offs_double_up_to_a_minute_and_success_resets_them() -> None:
    hand = Controller(slice_("s0"))
    delays: list[float] = []
    for turn in range(9):
        assert dispatched(hand.arrive(f"r{turn}")), turn
        hand.tell(give_up("s0"), Finished(f"r{turn}", 0, failed=True))
        [reject] = [a for a in hand.arrive(f"late{turn}") if isinstance(a, Reject)]
        delays.append(reject.retry_after_s)
        hand.now += reject.retry_after_s
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    hand.arrive("good")
    hand.tell(Finished("good", 3))
    hand.arrive("bad")
    hand.tell(give_up("s0"), Finished("bad", 0, failed=True))
    [reject] = [a for a in hand.arrive("last") if isinstance(a, Reject)]
    assert reject.retry_after_s == 1.0


@pytest.mark.parametrize("models", ["ab", "aa"], ids=["two models", "one model twice"])
def test_a_slice_on_which_nothing_works_is_replaced(models: str) -> None:
    hand = Controller(slice_("s0"), models="ab")
    for turn, model in enumerate(models):
        assert dispatched(hand.arrive(f"r{turn}", model=model))
        actions = hand.tell(
            give_up("s0", model, others=False), Finished(f"r{turn}", 0, failed=True)
        )
        assert (Replace("s0", REASON) in actions) == bool(turn)
        hand.now += 1.0
    hand.tell(SliceLost("s0", ()), SliceUp(slice_("s0")))
    assert dispatched(hand.arrive("after", model="b")) == {"after": "s0"}


def test_a_slice_on_which_something_works_is_not() -> None:
    hand = Controller(slice_("s0"), models="abc")
    for turn, others in enumerate((False, True, False)):
        model = "abc"[turn]
        hand.arrive(f"r{turn}", model=model)
        event = give_up("s0", model, others=others)
        actions = hand.tell(event, Finished(f"r{turn}", 0, failed=True))
        assert not any(isinstance(a, Replace) for a in actions)


def test_a_model_that_is_removed_takes_its_failures_along() -> None:
    hand = Controller(slice_("s0"))
    hand.arrive("r1")
    hand.tell(give_up("s0"), Finished("r1", 0, failed=True))
    hand.tell(ModelRemoving("a"))
    hand.ready(model_of("a"))
    assert dispatched(hand.arrive("r2")) == {"r2": "s0"}
