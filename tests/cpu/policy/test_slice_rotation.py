"""What becomes of a request's blocks while moves of its KV are under way."""

from dataclasses import replace

from slice_cases import request, small_slice, spec

from c2cserve.core.actions import Move, RunStep, SavePrefix, Truncate
from c2cserve.core.events import Activated, MoveDone, PrefixMoved, SeqOutcome, StepDone, Submitted
from c2cserve.core.request import Slo
from c2cserve.policy.slice.policy import SlicePolicy


def test_a_request_that_is_cut_off_during_a_copy_gives_its_blocks_back() -> None:
    policy = SlicePolicy(replace(small_slice(slabs=2), host_kv_bytes=1 << 20))
    for event in (Activated(spec(block=2048)), Submitted(request("r", prompt=40, new=90))):
        policy.apply(event)
    copy: Move | None = None
    ended, now = False, 0.0
    for _ in range(100):
        for action in policy.decide(now):
            ended |= isinstance(action, Truncate)
            if isinstance(action, Move):
                copy = action
            elif isinstance(action, SavePrefix):
                policy.apply(PrefixMoved(action.move, 0.01))
            elif isinstance(action, RunStep):
                [part] = action.step.seqs
                drawn = (SeqOutcome("r", 1, finished=False),) if part.emits else ()
                policy.apply(StepDone(action.step.id, drawn, 0.01))
        now += 0.1
    assert ended
    assert copy is not None
    assert copy.direction == "copy"
    assert policy.arena.held_bytes == 4 * 2048, "the copy reads them"
    policy.apply(MoveDone("r", "copy"))
    assert policy.arena.held_bytes == 0
    assert policy.running == 0


def test_a_request_that_has_outgrown_the_arena_ends_and_is_not_paused() -> None:
    """Its prompt fills the arena, so its second token has room nowhere; another request waits."""
    policy = SlicePolicy(replace(small_slice(slabs=2), host_kv_bytes=1 << 20))
    policy.apply(Activated(spec(block=2048)))
    policy.apply(Submitted(request("long", prompt=64, new=90)))
    [first] = policy.decide(0.0)
    assert isinstance(first, RunStep)
    policy.apply(Submitted(request("waits", prompt=16)))
    policy.apply(StepDone(first.step.id, (SeqOutcome("long", 1, finished=False),), 0.01))
    _, truncated, step = policy.decide(10.0)  # the first one saves the prefix
    assert truncated == Truncate("long")
    assert isinstance(step, RunStep)
    assert step.step.seqs[0].request_id == "waits"


def test_a_prompt_longer_than_the_memory_ends_on_arrival() -> None:
    """It waits for no memory that others hold."""
    policy = SlicePolicy(replace(small_slice(slabs=2), host_kv_bytes=1 << 20))
    policy.apply(Activated(spec(block=2048)))
    policy.apply(Submitted(request("fills", prompt=64)))
    policy.decide(0.0)
    policy.apply(Submitted(request("long", prompt=65)))
    assert list(policy.decide(0.0)) == [Truncate("long")]
    assert policy.waiting == 0


def test_a_prompt_longer_than_the_memory_leaves_its_place_in_line_to_others() -> None:
    slice_ = replace(small_slice(slabs=2), host_kv_bytes=1 << 20)
    policy = SlicePolicy(slice_)
    policy.apply(Activated(spec("big", block=6000)))
    policy.apply(Activated(spec("small", block=512)))
    for one in (request("long", "big", prompt=64), request("short", "small")):
        policy.apply(Submitted(one))
    truncated, step = policy.decide(0.0)
    assert isinstance(truncated, Truncate)
    assert isinstance(step, RunStep)
    assert step.step.seqs[0].request_id == "short"


def test_the_seconds_of_contention_are_counted() -> None:
    """Memory is full with one of two requests, until that one ends. The other counts once half of
    its time for the first token is over."""
    policy = SlicePolicy(replace(small_slice(slabs=2), host_kv_bytes=1 << 20), 2)
    policy.apply(Activated(spec(block=2048)))
    for name in ("first", "second"):
        policy.apply(Submitted(request(name, prompt=48, new=1, slo=Slo(1.0, 0.1))))
    for now, contended_s in ((0.75, 0.0), (1.0, 0.25), (1.25, 0.25)):
        steps = [one.step for one in policy.decide(now) if isinstance(one, RunStep)]
        assert policy.contended_s == contended_s
        for step in steps:
            outcome = SeqOutcome(step.seqs[0].request_id, 1, finished=True)
            policy.apply(StepDone(step.id, (outcome,), 0.01))
