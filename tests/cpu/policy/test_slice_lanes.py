"""A slice with two lanes: what streams holds nobody up, and each request is in one lane."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_cases import request, requests, small_slice, spec, world_of
from slice_hand import Hand

from c2cserve.core.actions import RunStep, SliceAction
from c2cserve.core.events import Activated, StepDone, StepFailed, Submitted
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.step import Step
from c2cserve.policy.slice.lanes import STREAMED_BYTES, Lanes
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import replay

STREAMED = 2 * STREAMED_BYTES


def lanes_slice(slabs: int = 16) -> Slice:
    return replace(small_slice(slabs), kind="gpu", gpu=GpuShare("GPU", 0), lanes=2)


class LanesHand(Hand):
    """Models `near` and `far`, two steps in flight in each lane."""

    def __init__(self, slabs: int = 16) -> None:
        self.policy = SlicePolicy(lanes_slice(slabs), 2)
        self.now = 0.0
        self.tell(*(Activated(spec(name)) for name in ("near", "far")))

    def steps(self, actions: Sequence[SliceAction]) -> list[Step]:
        return [action.step for action in actions if isinstance(action, RunStep)]

    def over(self, step: Step, streamed: int = 0, took_s: float = 0.01) -> list[Step]:
        """End a step; the steps that follow."""
        done = replace_streamed(self.done(step, took_s), streamed)
        return self.steps(self.tell(done))

    def ask(self, *models: str, new: int = 100) -> list[Step]:
        asked = (request(model, model, prompt=16, new=new) for model in models)
        return self.steps(self.tell(*(Submitted(one, chained=True) for one in asked)))


def replace_streamed(done: StepDone, streamed: int) -> StepDone:
    return StepDone(done.step_id, done.outcomes, done.compute_s, 1, streamed)


def resident(hand: LanesHand, name: str = "near") -> Step:
    """Have a model known to be resident; its first step in that lane."""
    [first] = hand.ask(name)
    assert first.lane == "streaming", "nothing is known of it"
    [second] = hand.over(first, 0)
    assert second.lane == "resident"
    return second


def test_resident_steps_go_on_while_a_stream_is_under_way() -> None:
    hand = LanesHand()
    steps = [resident(hand)]
    [stream] = hand.ask("far")
    assert (stream.model, stream.lane) == ("far", "streaming")
    for _ in range(20):
        hand.now += 0.003
        following = hand.over(steps.pop(0), 0, 0.003)
        assert all(one.model == "near" for one in following)
        steps += following
        assert steps
    [again] = [one for one in hand.over(stream, STREAMED, 0.3) if one.model == "far"]
    assert again.lane == "streaming"


def test_one_lane_has_every_step() -> None:
    hand = Hand("near", "far", max_in_flight=2)
    for name in ("near", "far"):
        for action in hand.tell(Submitted(request(name, name), chained=True)):
            assert isinstance(action, RunStep)
            assert action.step.lane == "resident"
    assert Lanes(1).of("near") == "resident"


def test_a_model_changes_lanes_between_steps() -> None:
    hand = LanesHand()
    step = resident(hand)
    second, ahead = hand.over(step, 0, 0.01)
    assert ahead.lane == "resident", "its next step is planned while one runs"
    assert hand.over(second, STREAMED, 0.01) == [], "it waits for its step in the other lane"
    [moved] = hand.over(ahead, STREAMED, 0.01)
    assert moved.lane == "streaming"


def test_two_streams_take_turns() -> None:
    hand = LanesHand()
    [first] = hand.ask("near", "far")
    [second] = hand.over(first, STREAMED, 0.3)
    [third] = hand.over(second, STREAMED, 0.3)
    assert {first.model, second.model} == {"near", "far"}
    assert {one.lane for one in (first, second, third)} == {"streaming"}


def test_little_over_a_link_is_no_stream() -> None:
    lanes = Lanes(2)
    assert lanes.of("m") == "streaming"
    lanes.landed("m", STREAMED_BYTES)
    assert lanes.of("m") == "resident"
    lanes.landed("m", STREAMED_BYTES + 1)
    assert lanes.of("m") == "streaming"
    lanes.landed("m", 0)
    lanes.forget()
    assert lanes.of("m") == "streaming"


def test_after_a_failed_step_nothing_is_known_of_weights() -> None:
    hand = LanesHand()
    step = resident(hand)
    actions = hand.tell(StepFailed(step.id, "no"))
    assert {one.lane for one in hand.steps(actions)} == {"streaming"}


def test_a_resident_lane_that_waits_for_its_kv_is_in_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else weights that its KV comes back to would leave."""
    hand = LanesHand()
    asked: list[bool] = []
    moving = SimpleNamespace(under_way=True, contended=False, plan=lambda *_: [])

    def break_deadlock() -> list[SliceAction]:
        asked.append(moving.under_way)
        return []

    monkeypatch.setattr(hand.policy._weights, "break_deadlock", break_deadlock)
    hand.ask("far")
    asked.clear()
    monkeypatch.setattr(hand.policy, "_rotation", moving)
    hand.tell()
    assert asked == []
    moving.under_way = False
    hand.tell()
    assert asked == [False]


def test_the_lane_that_is_short_of_memory_goes_first() -> None:
    lanes = Lanes(2)
    assert lanes.in_order() == ("resident", "streaming")
    lanes.short = "streaming"
    assert lanes.in_order() == ("streaming", "resident")


def test_step_times_are_those_of_a_lane() -> None:
    hand = LanesHand()
    step = resident(hand)
    hand.over(step, 0, 0.004)
    assert hand.policy.step_times()["near"].decode_step_s(1) == pytest.approx(0.004)
    assert hand.policy._time("near", "streaming").decode_step_s(1) != pytest.approx(0.004)


@pytest.mark.parametrize(("kind", "gpu"), [("cpu", None), ("gpu", GpuShare("GPU", 0))])
def test_only_gpu_slices_have_two_lanes(kind: str, gpu: GpuShare | None) -> None:
    with pytest.raises(ValueError, match="lanes"):
        replace(small_slice(), kind=kind, gpu=gpu, lanes=2 if gpu is None else 3)


@settings(max_examples=examples(80), deadline=None)
@given(
    requests, st.integers(0, 1000), st.integers(2, 24), st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.05]), st.sampled_from([0, 8, 1000]),
)  # fmt: skip
def test_every_request_ends_once_and_all_memory_comes_back(
    drawn: list, seed: int, slabs: int, park: float, fail: float, host: int
) -> None:
    """The world checks each step: its order, its lane, and how many are in flight there."""
    world = world_of(drawn, seed, slabs, 2, park, fail, host_blocks=host, lanes=2)
    world.run()
    world.check_end()
    assert world.kv.host_bytes == world.kv.prefix_bytes, "KV of requests is left there"


@settings(max_examples=15, deadline=None)
@given(requests, st.integers(0, 1000), st.integers(2, 24))
def test_decisions_repeat_exactly(drawn: list, seed: int, slabs: int) -> None:
    worlds = [world_of(drawn, seed, slabs, 2, 0.3, 0.0, lanes=2) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].log == worlds[1].log


def test_a_record_of_two_lanes_replays_to_the_same_actions(tmp_path: Path) -> None:
    drawn = [
        ("abc"[i % 3], 40 + i, 20, i / 10, 0, 0, 20, None, request("x").slo, True)
        for i in range(12)
    ]  # fmt: skip
    world = world_of(drawn, 3, 12, 2, 0.1, 0.0, lanes=2)
    world.run()
    record = Record(
        tmp_path / "r", "gpu0/1", "slice", {"slice": world.slice, "max_in_flight": 2}
    )  # fmt: skip
    for now, events, actions in world.log:
        record(now, events, actions)
    record.close()
    result = replay(tmp_path / "r")
    assert result.equal, result.streams[0].difference
    assert {step.lane for _, step in world.steps} == {"resident", "streaming"}
