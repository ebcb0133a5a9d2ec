"""How often a model is used, from its last uses."""

import pytest
from cluster_cases import spec
from controller_hand import Hand, dispatched

from c2cserve.core.actions import Evict
from c2cserve.core.events import Finished, ModelAdded
from c2cserve.core.machine import Slice
from c2cserve.policy.uses import Uses


def test_the_rate_follows_the_last_uses_and_falls_without_any() -> None:
    uses = Uses(0.0)
    assert uses.per_s(5.0) == 0.0
    for number in range(100):
        uses.note(float(number))
    assert uses.per_s(100.0) == pytest.approx(1.0, rel=0.1)
    assert uses.per_s(1600.0) == pytest.approx(0.01, rel=0.1)
    for number in range(20):
        uses.note(1600.0 + 0.1 * number)
    assert uses.per_s(1602.0) == pytest.approx(10.0, rel=0.1), "its past is forgotten"


def test_a_burst_within_one_load_is_one_use() -> None:
    regular, burst = Uses.of(10**9), Uses.of(10**9)
    for number in range(5):
        regular.note(60.0 * number)
    for number in range(900):
        burst.note(240.0 + number * 0.001)
    assert len(burst.times_s) == 1
    assert burst.per_s(400.0) < regular.per_s(400.0)


def test_the_pool_gives_up_what_is_used_least_often_not_what_was_used_first() -> None:
    hand = Hand(Slice("cpu0", "cpu"), models="", budget=90)
    hand.ready(spec("often", 30), spec("once", 30), spec("twice", 30))

    def use(name: str, model: str) -> None:
        assert dispatched(hand.arrive(name, model=model))
        hand.tell(Finished(name, 1))
        hand.now += 1.0

    for number in range(10):
        use(f"o{number}", "often")
    use("t1", "twice")
    use("t2", "twice")
    hand.now += 5.0
    use("n", "once")
    hand.now += 20.0
    hand.tell(ModelAdded(spec("new", 30)))
    actions = hand.arrive("r", model="new")
    assert [one for one in actions if isinstance(one, Evict)] == [Evict("once")]
