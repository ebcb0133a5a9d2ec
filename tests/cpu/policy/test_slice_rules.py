"""What the slice policy does in situations built by hand."""

from random import Random
from typing import Never

import pytest
from slice_cases import SLOS, request, small_slice, spec, world_of
from slice_hand import Hand, names

from c2cserve.core.actions import Drop, RunStep, Truncate
from c2cserve.core.events import (
    Activated,
    Deactivated,
    SeqOutcome,
    StepDone,
    StepParked,
    Submitted,
    Withdrawn,
)
from c2cserve.core.request import Slo
from c2cserve.policy.slice.batching import BY_HEADROOM, ActiveModel, headroom_budget
from c2cserve.policy.slice.estimate import StepTime
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.policy.slice.strategies import SliceStrategies, arena_of
from c2cserve.policy.weights.weight_memory import WeightMemory


def test_a_request_from_prompt_to_last_token() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r", prompt=100, new=3)))
    assert (step.tokens, step.seqs[0].fresh, step.seqs[0].emits) == (64, True, False)
    assert len(step.seqs[0].new_blocks) == 7, "the whole prompt has its room from the start"
    step = hand.step(hand.done(step))
    assert (step.seqs[0].start, step.tokens, step.seqs[0].emits) == (64, 36, True)
    assert not step.seqs[0].fresh
    step = hand.step(hand.done(step))
    assert (step.seqs[0].start, step.tokens, step.seqs[0].emits) == (100, 1, True)
    step = hand.step(hand.done(step))
    assert step.seqs[0].start == 101
    assert hand.tell(hand.done(step, finished=["r"])) == []
    assert hand.policy.running == hand.policy.waiting == 0


def test_the_model_with_least_headroom_runs() -> None:
    hand = Hand("a", "b")
    strict, lax = Slo(0.5, 0.1), Slo(2.0, 0.1)
    step = hand.step(
        Submitted(request("r1", "a", slo=lax)), Submitted(request("r2", "b", slo=strict))
    )
    assert step.model == "b"
    assert hand.step(hand.done(step)).model == "b", "0.6 s to its next token, a has 2 s"


def test_all_decodes_run_beside_every_chunk_of_a_long_prompt() -> None:
    hand = Hand(tokens=32)
    step = hand.step(Submitted(request("d1", new=40)), Submitted(request("d2", new=40)))
    while not all(part.emits for part in step.seqs):
        step = hand.step(hand.done(step))
    step = hand.step(hand.done(step), Submitted(request("long", prompt=200)))
    chunks = 0
    while "long" in names(step) and not step.seqs[-1].emits:
        assert sorted(names(step)) == ["d1", "d2", "long"]
        assert [part.tokens for part in step.seqs[:2]] == [1, 1]
        assert 16 <= step.seqs[2].tokens <= 32
        chunks += 1
        step = hand.step(hand.done(step))
    assert chunks >= 6


@pytest.mark.parametrize("whole", [False, True])
def test_an_urgent_prompt_goes_between_the_chunks_of_a_long_one(whole: bool) -> None:
    """Unless prompts are computed whole, as some baselines do."""
    hand = Hand()
    slice_ = small_slice()
    arena = arena_of(slice_)
    strategies: SliceStrategies[Never] = SliceStrategies(
        arena, WeightMemory(arena), whole_prompts=whole
    )
    hand.policy = SlicePolicy(slice_, 1, strategies)
    hand.tell(Activated(spec()))
    step = hand.step(Submitted(request("long", prompt=200, slo=SLOS[2])))
    step = hand.step(hand.done(step), Submitted(request("urgent", prompt=20, slo=SLOS[0])))
    assert (names(step)[0] == "urgent") is not whole


def test_a_chunk_shrinks_so_that_running_requests_keep_their_pace() -> None:
    hand = Hand(tokens=64, slabs=64)
    hand.now = 5.0  # late: nobody has lead to lose
    step = hand.step(Submitted(request("d", new=90, slo=Slo(1.0, 0.1))))
    step = hand.step(hand.done(step, 0.02 + 0.002 * 20))
    step = hand.step(hand.done(step, 0.02), Submitted(request("p", prompt=1000)))
    for _ in range(15):  # 0.02 s for the decode, 2 ms per prompt token
        step = hand.step(hand.done(step, 0.02 + 0.002 * (step.tokens - 1)))
    assert step.tokens - 1 == pytest.approx((0.1 - 0.02) / 0.002, abs=2)


def test_models_with_prompts_share_the_time_that_one_chunk_may_take() -> None:
    """They take turns, so a client waits for the chunks of all of them."""
    hand = Hand("a", "b", tokens=64, slabs=200)
    hand.now = 50.0  # late: nobody has lead to lose
    slo = Slo(1.0, 0.1)
    step = hand.step(Submitted(request("d", "a", new=90, slo=slo)))
    step = hand.step(hand.done(step, 0.002 * 20))
    asked = [Submitted(request(name, name, prompt=1000, slo=slo)) for name in "ab"]
    step = hand.step(hand.done(step, 0.001), *asked)
    chunks: dict[str, int] = {}
    for _ in range(40):  # 2 ms per prompt token
        chunks[step.model] = sum(part.tokens for part in step.seqs if not part.emits)
        step = hand.step(hand.done(step, 0.001 + 0.002 * chunks[step.model]))
    assert chunks == {"a": pytest.approx(25, abs=2), "b": pytest.approx(25, abs=2)}


def test_a_step_leaves_newcomers_half_of_their_time() -> None:
    for ttft_s, chunk in ((1.0, 50), (0.4, 20), (30.0, 64)):
        hand = Hand(tokens=64, slabs=64)
        step = hand.step(Submitted(request("r", prompt=1000, slo=Slo(ttft_s, 1.0))))
        step = hand.step(hand.done(step, 0.01 * step.tokens))
        assert step.tokens == pytest.approx(chunk, abs=1)


@pytest.mark.parametrize(
    ("ttft_s", "chunk"),
    [
        (2.0, 50),  # half of the strictest target, as it is in time with that
        (0.85, 84),  # 0.5 s for its tokens leave time for the decodes of three steps
        (0.62, 150),  # one step would do, but running requests wait for two tokens' time at most
        (0.55, 50),  # late in any case
    ],
)
def test_a_step_is_longer_where_a_prompt_would_be_late(ttft_s: float, chunk: int) -> None:
    """Decodes take 0.1 s of each step: so little of a prompt would be in each that it takes many,
    and their decodes more time than there is."""
    time = StepTime()
    for _ in range(3):
        time.learn(1, 0, 0.1)
        time.learn(1, 100, 0.3)
    model = ActiveModel("m", "m", 512, time, BY_HEADROOM)
    running = model.add(request("d", slo=Slo(0.4, 0.2)), True)
    running.started, running.due_s, model.started = True, 100.0, 1
    prompt = model.add(request("p", prompt=250, slo=Slo(ttft_s, 0.2)), True)
    assert headroom_budget([model], model, prompt, 0.0, 1, 4096) == pytest.approx(chunk, abs=1)


def test_a_prefix_is_reused_once_it_is_computed_but_never_to_the_last_token() -> None:
    hand = Hand()
    first = hand.step(Submitted(request("r1", prompt=32, family=7, shared=2)))
    step = hand.step(hand.done(first), Submitted(request("r2", prompt=32, family=7, shared=2)))
    [_, second] = step.seqs
    assert (second.start, second.tokens) == (16, 16), "both blocks match, the last token is in one"
    assert second.new_blocks[0] == first.seqs[0].new_blocks[0]
    assert second.new_blocks[1] != first.seqs[0].new_blocks[1]
    step = hand.step(hand.done(step), Submitted(request("r3", prompt=33, family=7, shared=2)))
    assert (step.seqs[2].start, step.seqs[2].tokens) == (32, 1)
    assert step.seqs[2].new_blocks[:2] == first.seqs[0].new_blocks[:2]
    assert hand.policy.cached_tokens == 48


def test_what_a_failed_request_has_computed_is_not_reused() -> None:
    hand = Hand()
    first = hand.step(Submitted(request("r1", prompt=100, family=7, shared=6)))
    second = hand.step(hand.done(first))
    failed = StepDone(second.id, (SeqOutcome("r1", 0, finished=True, failed=True),), 0.01)
    step = hand.step(failed, Submitted(request("r2", prompt=100, family=7, shared=6)))
    assert step.seqs[0].start == 0


def test_a_prefix_that_is_still_being_computed_is_not_reused() -> None:
    hand = Hand()
    same = [Submitted(request(name, prompt=30, family=7, shared=1)) for name in ("r1", "r2")]
    step = hand.step(*same)
    assert [part.start for part in step.seqs] == [0, 0]
    assert not set(step.seqs[0].new_blocks) & set(step.seqs[1].new_blocks)


def test_a_failed_step_leaves_nothing_to_reuse() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1", prompt=20, family=7, shared=1)))
    failed = StepDone(step.id, (SeqOutcome("r1", 0, True, failed=True),), 0.01)
    step = hand.step(failed, Submitted(request("r2", prompt=20, family=7, shared=1)))
    assert step.seqs[0].start == 0


def test_a_model_that_comes_back_does_not_find_its_old_kv() -> None:
    """Its weights may have been replaced meanwhile."""
    hand = Hand()
    step = hand.step(Submitted(request("r1", prompt=20, family=7, shared=1)))
    hand.tell(hand.done(step, finished=["r1"]))
    hand.tell(Deactivated("m"), Activated(spec("m")))
    step = hand.step(Submitted(request("r2", prompt=20, family=7, shared=1)))
    assert step.seqs[0].start == 0


def test_a_model_may_come_back_while_its_last_step_still_waits() -> None:
    hand = Hand()
    old = hand.step(Submitted(request("r1", prompt=20)))
    hand.tell(StepParked(old.id), Withdrawn("r1"), Deactivated("m"))
    new = hand.step(Activated(spec("m", 3 * 512)), Submitted(request("r2", prompt=20)))
    assert not set(new.seqs[0].new_blocks) & set(old.seqs[0].new_blocks)
    hand.tell(hand.done(old), hand.done(new, finished=["r2"]))
    assert hand.policy.arena.held_bytes == 0


def test_withdrawn_requests_go_at_once_or_when_their_step_is_done() -> None:
    hand = Hand()
    step = hand.step(Submitted(request("r1")), Submitted(request("r2")))
    assert hand.tell(Withdrawn("r1")) == []
    assert hand.policy.arena.held_bytes > 0
    drop, run = hand.tell(hand.done(step))
    assert drop == Drop("r1")
    assert isinstance(run, RunStep)
    assert names(run.step) == ["r2"]
    hand.tell(hand.done(run.step, finished=["r2"]), Submitted(request("r3")))
    assert hand.tell(Submitted(request("r4")), Withdrawn("r4"))[0] == Drop("r4")
    assert hand.tell(Withdrawn("nobody")) == []


def test_a_parked_step_leaves_the_slice_to_others() -> None:
    hand = Hand("a", "b")
    cold = hand.step(Submitted(request("r1", "a")))
    assert hand.tell(Submitted(request("r2", "b"))) == []
    step = hand.step(StepParked(cold.id))
    assert step.model == "b"
    assert hand.tell(Submitted(request("r3", "a"))) == [], "one step of a model at a time"
    assert hand.tell(hand.done(cold)) == [], "b is still computing"
    assert hand.step(hand.done(step)).model == "a"


def test_a_prompt_that_can_never_fit_is_cut_off_and_holds_nobody_up() -> None:
    hand = Hand(slabs=1)  # 8 blocks
    truncate, run = hand.tell(
        Submitted(request("big", prompt=129)), Submitted(request("small", at=0.1))
    )
    assert truncate == Truncate("big")
    assert isinstance(run, RunStep)
    assert names(run.step) == ["small"]


def test_a_lone_request_grows_until_the_arena_ends() -> None:
    hand = Hand(slabs=1)
    step = hand.step(Submitted(request("r", prompt=120, new=999)))
    while True:
        [action] = hand.tell(hand.done(step))
        if not isinstance(action, RunStep):
            break
        step = action.step
    assert action == Truncate("r")
    assert step.seqs[0].start == 127
    assert hand.policy.arena.held_bytes == 0


def test_the_request_with_most_headroom_is_preempted_and_starts_again() -> None:
    hand = Hand(slabs=1)
    calm, hurried = Slo(8.0, 1.0), Slo(0.5, 0.1)
    step = hand.step(
        Submitted(request("calm", prompt=46, new=99, slo=calm)),
        Submitted(request("hurried", prompt=46, new=99, slo=hurried)),
    )
    restarted = None
    for _ in range(60):
        actions = hand.tell(hand.done(step))
        if Drop("calm", requeued=True) in actions:
            assert hand.policy.preemptions == 1
        assert not any(isinstance(action, Truncate) for action in actions)
        step = next(action.step for action in actions if isinstance(action, RunStep))
        hand.now += 0.001
        if hand.policy.preemptions and "calm" in names(step):
            restarted = next(part for part in step.seqs if part.request_id == "calm")
            break
        if hand.policy.preemptions and len(step.seqs) == 1:
            done = hand.done(step, finished=["hurried"])
            [again] = hand.tell(done)
            assert isinstance(again, RunStep)
            [restarted] = again.step.seqs
            break
    assert restarted is not None
    assert restarted.request_id == "calm"
    assert restarted.fresh
    assert restarted.start in {0, 16, 32}, "from its tokens, reusing what is still cached"
    assert restarted.tokens + restarted.start > 46 or not restarted.emits


def test_small_requests_do_not_overtake_a_large_one_that_waits_for_memory() -> None:
    hand = Hand(slabs=2)  # 16 blocks
    step = hand.step(Submitted(request("r0", prompt=100, new=60)))
    hand.tell(Submitted(request("large", prompt=200, at=0.01)))
    for i in range(20):
        step = hand.step(hand.done(step), Submitted(request(f"s{i}", prompt=5, at=0.02)))
        assert names(step) == ["r0"]
    step = hand.step(hand.done(step, finished=["r0"]))
    assert names(step)[0] == "large"


def test_a_flooded_model_does_not_starve_another() -> None:
    hand = Hand("flood", "quiet", slabs=64, max_batch=2)
    step = hand.step(*(Submitted(request(f"f{i}", "flood", new=30)) for i in range(40)))
    hand.now = 50.0  # the flood is hopelessly late by now
    hand.tell(Submitted(request("q", "quiet", at=50.0)))
    models = []
    for _ in range(6):
        step = hand.step(hand.done(step))
        models.append(step.model)
        hand.now += 0.05
    assert models == ["flood", "quiet"] * 3


def test_a_running_model_is_kept_to_its_batch() -> None:
    hand = Hand(max_batch=3, slabs=64)
    step = hand.step(*(Submitted(request(f"r{i}", new=5)) for i in range(5)))
    assert len(step.seqs) <= 3
    for _ in range(4):
        step = hand.step(hand.done(step))
        assert len(step.seqs) == hand.policy.running == 3
        assert hand.policy.waiting == 2


@pytest.mark.parametrize("seed", range(60))
def test_a_crowded_slice_finishes_everything(seed: int) -> None:
    random = Random(seed)
    drawn = [
        (
            random.choice("abc"), random.randint(1, 200), random.randint(1, 40), random.random(),
            random.randint(0, 2), random.randint(0, 12), random.randint(1, 60),
            random.choice([None, None, random.random()]), random.choice(SLOS),
            random.random() < 0.8,
        )
        for _ in range(40)
    ]  # fmt: skip
    world = world_of(drawn, seed, random.randint(2, 12), random.choice([1, 2]), 0.2, 0.02)
    world.run()
    assert all(job.ended for job in world.jobs.values())
