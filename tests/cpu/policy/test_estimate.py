from random import Random

import pytest

from c2cserve.policy.slice.estimate import StepTime, allowed_step_s


def learned(a: float = 0.01, b: float = 0.001, c: float = 0.0005, noise: float = 0.0) -> StepTime:
    """A machine on which a step takes a + b * decodes + c * prefill tokens."""
    random, time = Random(1), StepTime()
    for _ in range(400):
        batch = 2 ** random.randint(0, 5)
        time.learn(batch, 0, (a + b * batch) * random.uniform(1 - noise, 1 + noise))
    for _ in range(100):
        tokens, batch = random.randint(16, 256), random.choice([0, 1, 4])
        took = (a + b * batch + c * tokens) * random.uniform(1 - noise, 1 + noise)
        time.learn(batch, tokens, took)
    return time


def test_it_learns_what_steps_cost() -> None:
    time = learned(noise=0.05)
    for batch in (1, 3, 8, 20, 32):
        assert time.decode_step_s(batch) == pytest.approx(0.01 + 0.001 * batch, rel=0.1)
    assert time.prefill_token_s == pytest.approx(0.0005, rel=0.15)


def test_beyond_what_is_known_the_nearest_counts() -> None:
    time = StepTime()
    assert time.decode_step_s(4) == 0.0
    time.learn(4, 0, 0.02)
    assert time.decode_step_s(1) == time.decode_step_s(64) == 0.02


def test_a_chunk_fits_beside_the_decodes() -> None:
    time = learned()
    chunk = time.chunk(8, 0.1, 16, 512)
    assert chunk == pytest.approx((0.1 - 0.018) / 0.0005, rel=0.1)
    assert time.chunk(8, 0.019, 16, 512) == 16, "it always goes on a little"
    assert time.chunk(0, float("inf"), 16, 512) == 512
    assert learned(c=0.01).chunk(0, 0.5, 16, 512) == pytest.approx(50, rel=0.1)


def test_the_first_chunks_are_small_until_the_speed_is_known() -> None:
    assert StepTime().chunk(0, float("inf"), 16, 512) == 64
    assert StepTime().chunk(3, 0.1, 16, 512) == 16
    assert StepTime().chunk(0, float("inf"), 16, 40) == 40


def test_tiny_times_do_not_overflow() -> None:
    time = StepTime(prefill_token_s=5e-324)
    assert time.chunk(0, float("inf"), 16, 512) == 512


@pytest.mark.parametrize(
    ("headroom_s", "allowed_s"),
    [(-3.0, 0.1), (0.05, 0.1), (0.15, 0.15), (0.2, 0.2), (9.0, 0.2)],
)
def test_a_step_may_use_up_lead_but_not_cause_a_gap(headroom_s: float, allowed_s: float) -> None:
    assert allowed_step_s(headroom_s, 0.1) == pytest.approx(allowed_s)


def test_a_first_step_that_also_prepares_things_is_not_believed() -> None:
    """The first prefill of a model registers its memory, the first decode of a size captures."""
    time = StepTime()
    time.learn(0, 16, 0.5)
    time.learn(1, 0, 0.3)
    assert time.settled is None, "one step may have done anything"
    time.learn(0, 512, 0.013)
    time.learn(1, 0, 0.003)
    assert time.settled is not None
    decode_s, token_s = time.settled
    assert decode_s == 0.003
    assert 512 * token_s <= 0.013
    time.learn(4, 0, 0.3)  # a larger batch is captured
    assert time.settled is None
    time.learn(4, 0, 0.004)
    assert time.settled is not None
    assert time.settled[0] == 0.004


@pytest.mark.parametrize("odd_s", [0.0, 0.5])
def test_a_step_that_stands_out_changes_nothing(odd_s: float) -> None:
    """A step that is noticed late takes long, and the one that is noticed with it no time."""
    time = learned()
    before_s, token_s = time.decode_step_s(4), time.prefill_token_s
    time.learn(4, 0, odd_s)
    time.learn(0, 16, 0.5)
    assert time.decode_step_s(4) == pytest.approx(before_s, rel=0.01)
    assert time.prefill_token_s == pytest.approx(token_s, rel=0.1)


def test_what_lasts_is_believed_soon() -> None:
    time = learned()
    for _ in range(5):
        time.learn(4, 0, 0.05)
    assert time.decode_step_s(4) == pytest.approx(0.05)
    for _ in range(16):
        time.learn(0, 256, 0.011 + 256 * 0.002)
    assert time.prefill_token_s == pytest.approx(0.002, rel=0.02)


def test_short_prompts_do_not_outweigh_a_long_one() -> None:
    """On a GPU a prompt of 16 tokens takes as long as one of 512."""
    time = StepTime()
    time.learn(1, 0, 0.003)
    for tokens in (16, 512, 16, 20, 30, 16):
        time.learn(0, tokens, 0.013)
    assert 512 * time.prefill_token_s < 0.1


def test_chunks_grow_while_prompts_take_no_longer_than_the_weights() -> None:
    """A step that reads weights over a link takes as long for many tokens as for one."""
    time = StepTime()
    time.learn(1, 0, 0.02)
    chunks: list[int] = []
    for _ in range(6):
        chunks.append(time.chunk(1, 0.1, 16, 512))
        time.learn(1, chunks[-1], 0.02)
    assert chunks == [16, 32, 64, 128, 256, 512]
    assert time.chunk(1, 0.01, 16, 512) == 512, "fewer would end no sooner"
    assert time.chunk(0, 0.1, 16, 512) == 512


def test_chunks_fit_again_once_prompts_take_time() -> None:
    time = StepTime()
    time.learn(1, 0, 0.02)
    for tokens in (16, 32, 64):
        time.learn(1, tokens, 0.02)
    for _ in range(2):
        time.learn(1, 128, 0.02 + 0.128)
    assert time.prefill_token_s > 0.0
    assert time.chunk(1, 0.05, 16, 512) < 128


def test_short_prompts_without_cost_say_little_of_long_ones() -> None:
    time = StepTime()
    time.learn(1, 0, 0.02)
    for _ in range(16):
        time.learn(1, 9, 0.02)
    assert time.chunk(1, 0.1, 16, 512) == 18
    assert time.chunk(0, 0.1, 16, 512) == 64, "as before anything is known"
