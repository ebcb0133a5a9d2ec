import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.policy.baselines.slinfer.shadow import (
    OVERESTIMATE,
    Prompt,
    Shadow,
    in_time,
    round_fits,
)
from c2cserve.policy.cluster.quantify import Learned, StepTable

TIMES = StepTable([(1, 0.01), (1001, 1.01)], [(512, 1, 0.05), (512, 10, 0.14)])
"""A prompt token is a millisecond; a decode step 40 ms and 10 ms per sequence."""


def decoding(batch: int, due_s: float, tpot_s: float = 0.25) -> Shadow:
    return Shadow(TIMES, [], batch, 100.0 * batch, due_s, tpot_s)


def newcomer(tokens: int, due_s: float) -> Prompt:
    return Prompt(due_s, tokens, 0.25, newcomer=True)


def test_an_empty_slice_takes_what_it_can_compute_in_time() -> None:
    assert in_time([Shadow(TIMES, [newcomer(500, 0.6)])], 0.0)


def test_case_1_the_newcomer_itself_is_late() -> None:
    assert not in_time([Shadow(TIMES, [newcomer(600, 0.6)])], 0.0)
    busy = Shadow(TIMES, [Prompt(0.4, 300, 0.25)])
    assert not in_time([busy, Shadow(TIMES, [newcomer(300, 0.6)])], 0.0), "two prompts in a row"


def test_case_2_somebody_else_becomes_late() -> None:
    assert not in_time([decoding(1, 0.3), Shadow(TIMES, [newcomer(900, 1.2)])], 0.0)
    assert in_time([decoding(1, 5.0), Shadow(TIMES, [newcomer(900, 1.2)])], 0.0)
    assert not in_time(
        [Shadow(TIMES, [newcomer(400, 0.5)]), Shadow(TIMES, [Prompt(0.6, 200, 1)])], 0
    )


def test_a_decoding_neighbour_gains_headroom_first_when_there_is_time_for_that() -> None:
    # Due in 0.3 s, a prompt of 1 s beside it: lost if that went first, and it need not.
    assert in_time([decoding(1, 0.3), Shadow(TIMES, [newcomer(900, 1.8)])], 0.0)


def test_who_is_late_already_is_no_reason_to_refuse() -> None:
    assert in_time([decoding(1, -1.0), Shadow(TIMES, [newcomer(100, 5.0)])], 0.0)
    assert in_time([Shadow(TIMES, [Prompt(-1.0, 100, 0.25)]), Shadow(TIMES, [newcomer(9, 3.0)])], 0)


def test_case_3_one_round_takes_longer_than_a_token_may() -> None:
    assert round_fits([decoding(4, 9.0), decoding(4, 9.0)])
    assert not round_fits([decoding(10, 9.0), decoding(10, 9.0)])
    assert not round_fits([decoding(10, 9.0), Shadow(TIMES, [newcomer(9, 9.0)] * 9)])


def test_a_round_has_time_for_the_prompts_to_come() -> None:
    """Ten requests with prompts of 0.5 s and answers of 50 tokens: 9 * 0.5 / 50 s in each round of
    0.14 s."""
    full = decoding(10, 9.0)
    full.prompts_s, full.mean_output = 10 * 0.5, 50.0
    assert full.decode_s() == pytest.approx(0.14)
    full.tpot_s = OVERESTIMATE * (0.14 + 0.09) + 1e-6
    assert round_fits([full])
    full.tpot_s -= 2e-6
    assert not round_fits([full])


def test_a_request_alone_does_not_wait_for_other_prompts() -> None:
    alone = decoding(1, 9.0, tpot_s=0.06)
    alone.prompts_s, alone.mean_output = 5.0, 2.0
    assert round_fits([alone])


def test_unknown_times_fail() -> None:
    assert not round_fits([Shadow(Learned(), [newcomer(1, 9.0)])])


@st.composite
def shadows(draw: st.DrawFn) -> Shadow:
    found = draw(st.lists(st.tuples(st.floats(-1.0, 10.0), st.integers(1, 900)), max_size=4))
    prompts = [Prompt(due_s, tokens, 0.25) for due_s, tokens in sorted(found)]
    batch = draw(st.integers(0, 4))
    if not batch:
        return Shadow(TIMES, prompts)
    return Shadow(TIMES, prompts, batch, 100.0 * batch, draw(st.floats(-1.0, 10.0)), 0.25)


@given(st.lists(shadows(), min_size=1, max_size=5), st.integers(1, 900), st.floats(0.0, 10.0))
def test_it_ends_and_agrees_with_necessary_conditions(
    others: list[Shadow], tokens: int, due_s: float
) -> None:
    everybody = [*others, Shadow(TIMES, [newcomer(tokens, due_s)])]
    if not round_fits(everybody):
        return
    alone_s = OVERESTIMATE * TIMES.prefill_s(tokens)
    on_time = in_time(everybody, 0.0)
    if on_time:
        assert alone_s <= due_s


@given(st.lists(shadows(), min_size=1, max_size=4), st.integers(1, 900))
def test_endless_headroom_is_never_refused(others: list[Shadow], tokens: int) -> None:
    for one in others:
        one.prompts = [Prompt(1e6, prompt.tokens, 0.25) for prompt in one.prompts]
        if one.batch:
            one.due_s = 1e6
    everybody = [*others, Shadow(TIMES, [newcomer(tokens, 1e6)])]
    if round_fits(everybody):
        assert in_time(everybody, 0.0)
