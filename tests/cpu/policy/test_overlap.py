"""What the slice policy does where steps overlap: the next one is planned while one runs."""

import pytest
from slice_cases import request, world_of
from slice_hand import Hand, names

from c2cserve.core.actions import Drop, RunStep, SliceAction, Truncate
from c2cserve.core.events import (
    Deactivated,
    SeqOutcome,
    StepDone,
    StepParked,
    Submitted,
    Withdrawn,
)
from c2cserve.core.request import Slo
from c2cserve.core.step import Step


def two(*models: str, **more: int) -> Hand:
    return Hand(*models, max_in_flight=2, **more)


def steps(actions: "list[SliceAction] | tuple[SliceAction, ...]") -> list[Step]:
    return [action.step for action in actions if isinstance(action, RunStep)]


def running(hand: Hand, *requests: Submitted, took_s: float = 0.01) -> tuple[Step, Step]:
    """Decodes of all of them, two steps in flight."""
    flying = steps(hand.tell(*requests))
    for _ in range(9):
        flying += steps(hand.tell(hand.done(flying.pop(0), took_s)))
        if len(flying) == 2 and all(len(step.seqs) == len(requests) for step in flying):
            return flying[0], flying[1]
    raise AssertionError("steps do not overlap")


def test_a_token_is_asked_for_while_the_one_before_is_drawn() -> None:
    hand = two()
    first, second = running(hand, Submitted(request("r"), chained=True))
    assert [part.tokens for part in (*first.seqs, *second.seqs)] == [1, 1]
    assert second.seqs[0].start == first.seqs[0].start + 1
    assert first.seqs[0].emits
    assert second.seqs[0].emits
    [third] = steps(hand.tell(hand.done(first)))
    assert third.seqs[0].start == second.seqs[0].start + 1


def test_tokens_that_the_host_draws_are_waited_for_by_all_of_their_model() -> None:
    hand = two("m", "other")
    step = hand.step(Submitted(request("host")), Submitted(request("chained"), chained=True))
    for _ in range(3):
        step = hand.step(hand.done(step))
        assert sorted(names(step)) == ["chained", "host"]
    [beside] = steps(hand.tell(Submitted(request("o", "other"))))
    assert beside.model == "other", "whose steps may overlap with it"


def test_nothing_is_planned_ahead_while_nobody_knows_how_long_steps_take() -> None:
    hand = two()
    step = hand.step(Submitted(request("r", prompt=200), chained=True))
    assert hand.tell() == []
    assert hand.policy.wakeup is None
    assert steps(hand.tell(hand.done(step))), "one chunk says it"


def test_a_long_steps_successor_is_planned_shortly_before_it_ends() -> None:
    hand = two()
    step = hand.step(Submitted(request("r", new=50), chained=True))
    for _ in range(3):
        hand.now += 0.3
        step = hand.step(hand.done(step, 0.3))
    assert hand.policy.wakeup == pytest.approx(hand.now + 0.3 - 0.02)
    start, hand.now = hand.now, hand.now + 0.1
    assert hand.tell(Submitted(request("late"), chained=True)) == []
    assert hand.policy.wakeup == pytest.approx(start + 0.28)
    hand.now = hand.policy.wakeup
    second = hand.step()
    assert sorted(names(second)) == ["late", "r"], "who came meanwhile has a part in it"
    assert hand.policy.wakeup is None
    hand.now = start + 0.31
    assert hand.tell(hand.done(step, 0.3)) == []
    assert hand.policy.wakeup == pytest.approx(hand.now + second.tokens * 0.015 + 0.28, abs=0.3)


def test_a_slice_without_overlap_is_never_woken() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r", new=50), chained=True))
    for _ in range(5):
        step = hand.step(hand.done(step, 0.3))
        assert hand.policy.wakeup is None
        assert hand.tell() == []


def test_no_step_is_planned_after_the_last_token() -> None:
    hand = two()
    first, second = running(hand, Submitted(request("r", prompt=20, new=4), chained=True))
    assert second.seqs[0].start == 22
    assert hand.tell(hand.done(first)) == [], "the second step draws the fourth token"
    assert hand.tell(hand.done(second, finished=["r"])) == []
    assert hand.policy.arena.held_bytes == 0


def test_a_stop_is_noticed_a_step_late_and_its_blocks_wait_for_that_step() -> None:
    hand = two()
    first, second = running(
        hand, Submitted(request("a"), chained=True), Submitted(request("b"), chained=True)
    )
    held = hand.policy.arena.held_bytes
    [third] = steps(hand.tell(hand.done(first, finished=["a"])))
    assert names(third) == ["b"]
    assert hand.policy.arena.held_bytes == held, "the second step still writes there"
    done = hand.done(second)
    surplus = StepDone(done.step_id, done.outcomes[1:], done.compute_s)
    assert [o.request_id for o in surplus.outcomes] == ["b"]
    assert not any(isinstance(action, Drop) for action in hand.tell(surplus))
    assert hand.policy.arena.held_bytes < held


def test_a_withdrawn_request_goes_when_both_its_steps_are_done() -> None:
    hand = two()
    first, second = running(hand, Submitted(request("r", new=50), chained=True))
    assert hand.tell(Withdrawn("r")) == []
    assert hand.tell(hand.done(first)) == []
    assert hand.policy.arena.held_bytes > 0
    assert hand.tell(hand.done(second)) == [Drop("r")]
    assert hand.policy.arena.held_bytes == 0


def test_a_withdrawn_request_that_ends_by_itself_is_not_dropped_again() -> None:
    hand = two()
    first, second = running(hand, Submitted(request("r", new=50), chained=True))
    hand.tell(Withdrawn("r"))
    assert hand.tell(hand.done(first, finished=["r"])) == []
    assert hand.tell(StepDone(second.id, (), 0.01)) == []
    assert hand.policy.arena.held_bytes == 0


def test_a_failed_step_takes_the_next_ones_with_it() -> None:
    hand = two()
    first, second = running(hand, Submitted(request("r"), chained=True))
    failed = StepDone(first.id, (SeqOutcome("r", 0, True, failed=True),), 0.01)
    assert hand.tell(failed, Deactivated("m")) == []
    assert hand.policy.arena.held_bytes > 0
    assert hand.tell(StepDone(second.id, (), 0.01)) == []
    assert hand.policy.arena.held_bytes == 0
    assert not hand.policy._deactivated


def test_what_comes_after_a_failed_chunk_is_not_reused() -> None:
    hand = two(tokens=16)
    flying = steps(hand.tell(Submitted(request("w", prompt=32), chained=True)))
    flying += steps(hand.tell(hand.done(flying.pop(0))))
    hand.tell(*[hand.done(step, finished=["w"]) for step in flying])
    asked = request("r1", prompt=48, family=7, shared=3)
    first, second = steps(hand.tell(Submitted(asked, chained=True)))
    assert (first.seqs[0].start, second.seqs[0].start) == (0, 16)
    hand.tell(StepDone(first.id, (SeqOutcome("r1", 0, True, failed=True),), 0.01))
    hand.tell(StepDone(second.id, (), 0.01))
    again = steps(hand.tell(Submitted(request("r2", prompt=48, family=7, shared=3))))
    assert again[0].seqs[0].start == 0


def test_a_parked_step_holds_its_model_up_and_no_other() -> None:
    hand = two("a", "b")
    cold, _ = running(hand, Submitted(request("r", "a", new=50), chained=True))
    assert steps(hand.tell(StepParked(cold.id))) == []
    [other] = steps(hand.tell(Submitted(request("q", "b"), chained=True)))
    assert other.model == "b"


def test_two_models_overlap() -> None:
    hand = two("a", "b")
    for name in "ab":
        step = hand.step(Submitted(request(f"{name}0", name, new=2)))
        step = hand.step(hand.done(step))
        hand.tell(hand.done(step, finished=[f"{name}0"]))
    first, second = steps(hand.tell(*(Submitted(request(f"r{m}", m)) for m in "ab")))
    assert {first.model, second.model} == {"a", "b"}


def test_a_running_request_is_preempted_only_after_it_has_landed() -> None:
    """Short of memory, steps do not overlap: who must go is not in flight then."""
    hand = two(slabs=1)
    calm, hurried = Slo(8.0, 1.0), Slo(0.5, 0.1)
    flying = steps(
        hand.tell(
            Submitted(request("calm", prompt=46, new=99, slo=calm), chained=True),
            Submitted(request("hurried", prompt=46, new=99, slo=hurried), chained=True),
        )
    )
    overlapped = 0
    while not hand.policy.preemptions:
        step = flying.pop(0)
        actions = hand.tell(hand.done(step))
        assert not any(isinstance(action, Truncate) for action in actions)
        if Drop("calm", requeued=True) in actions:
            assert not flying
        flying += steps(actions)
        overlapped += len(flying) == 2
        hand.now += 0.001
    assert overlapped > 10


def test_a_model_short_of_memory_lets_all_steps_land() -> None:
    """One that always overlaps would never have anybody who can be preempted."""
    hand = two("a", "b", slabs=2)
    lax, strict = Slo(8.0, 0.1), Slo(2.0, 0.1)
    flying = steps(hand.tell(Submitted(request("lax", "a", 20, 90, slo=lax), chained=True)))
    for _ in range(4):
        flying += steps(hand.tell(hand.done(flying.pop(0))))
    assert len(flying) == 2
    hand.tell(Submitted(request("strict", "b", prompt=100, new=40, slo=strict), chained=True))
    models = ""
    while not hand.policy.preemptions:
        step = flying.pop(0)
        models += step.model
        flying += steps(hand.tell(hand.done(step)))
        hand.now += 0.01
    assert flying[0].seqs[0].start == 128
    assert models.count("b") == 30
    assert len(models) - models.rindex("b") <= 4


@pytest.mark.parametrize("seed", range(3))
def test_these_worlds_do_overlap(seed: int) -> None:
    """What the properties of `test_slice` are worth something for."""
    drawn = [
        ("abc"[i % 3], 10 + 9 * i, 30, 0.05 * i, 0, 0, 8 + i % 20, 0.4 if i % 5 == 0 else None,
         Slo(1.0, 0.1), True)
        for i in range(24)
    ]  # fmt: skip
    world = world_of(drawn, seed, 24, 2, 0.0, 0.0)
    world.run()
    assert world.surplus > 0
    reads_ahead = 0
    known: dict[str, int] = {}
    for _, events, actions in world.log:
        for event in events:
            if isinstance(event, StepDone):
                for outcome in event.outcomes:
                    known[outcome.request_id] = known.get(outcome.request_id, 0) + outcome.drawn
        for step in steps(actions):
            reads_ahead += sum(
                part.start >= world.jobs[part.request_id].request.prompt_len
                + known.get(part.request_id, 0)
                for part in step.seqs
            )  # fmt: skip
    assert reads_ahead > 20
