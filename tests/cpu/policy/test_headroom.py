import pytest

from c2cserve.core.request import Request, Slo
from c2cserve.policy.headroom import due_s, next_turn


def test_equation_1_of_slinfer() -> None:
    """Its own example: TPOT_SLO 0.25 s, headroom 1.9 s, an iteration of 0.2 s -> 1.95 s."""
    request = Request("r", "m", 4, 9, arrival_s=10.0, slo=Slo(2.0, 0.25))
    now = 10.1
    assert due_s(request, 0) - now == pytest.approx(1.9)
    assert due_s(request, 1) - (now + 0.2) == pytest.approx(1.95)


def test_least_headroom_runs_and_names_break_ties() -> None:
    assert next_turn([(5.0, 1, "a"), (4.0, 9, "b")], 1.0, False) == (False, "b")
    assert next_turn([(4.0, 9, "b"), (4.0, 1, "a")], 1.0, True) == (False, "a")
    assert next_turn([], 1.0, False) is None


def test_late_models_take_turns_however_late_they_are() -> None:
    steps = {"a": 0, "b": 0, "c": 0}
    due = {"a": -100.0, "b": -1.0, "c": 0.5}
    order = []
    late_ran = False
    for number in range(1, 10):
        turn = next_turn([(due[m], steps[m], m) for m in steps], 1.0, late_ran)
        assert turn is not None
        late_ran, name = turn
        steps[name] = number
        order.append(name)
    assert order == ["a", "b", "c"] * 3


def test_the_punctual_get_every_second_step_beside_the_late() -> None:
    late_ran = False
    order = []
    for _ in range(6):
        turn = next_turn([(0.0, 0, "late"), (9.0, 0, "punctual")], 1.0, late_ran)
        assert turn is not None
        late_ran, name = turn
        order.append(name)
    assert order == ["late", "punctual"] * 3
