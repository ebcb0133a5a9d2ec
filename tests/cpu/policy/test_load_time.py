"""What loads are believed to take, from those that were seen."""

import random

import pytest
from fleet_world import spec
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.fleet import FleetNode, NodeReport
from c2cserve.core.model import ModelSpec
from c2cserve.policy.fleet.load_time import LoadTime
from c2cserve.policy.fleet.nodes import NodeBook
from c2cserve.policy.uses import LOAD_BYTES_PER_S

TINY, SMALL, LARGE = spec("t", 1_300_000), spec("s", 10**9), spec("l", 16 * 10**9)


def seen(took_s: float, chance: random.Random) -> float:
    """What it takes by reports that come twice a second."""
    return max(0.0, took_s + chance.uniform(-0.25, 0.25))


def test_slow_loads_of_tiny_models_say_nothing_of_the_rate() -> None:
    """A busy machine takes seconds for a file of a megabyte. Weights do not become slower by it."""
    loads = LoadTime()
    before_s = loads.of(LARGE) - loads.of(TINY)
    for _ in range(50):
        loads.learn(TINY, 2.75)
    assert loads.of(TINY) == pytest.approx(2.75, rel=0.1)
    assert loads.of(LARGE) - loads.of(TINY) == pytest.approx(before_s, rel=0.05)


@given(
    fixed_s=st.floats(0.0, 3.0),
    gb_per_s=st.floats(0.1, 20.0),
    mix=st.lists(st.sampled_from((TINY, SMALL, LARGE)), min_size=1, max_size=3, unique=True),
    seed=st.integers(0, 1000),
)
def test_what_was_seen_is_believed_of_each_size(
    fixed_s: float, gb_per_s: float, mix: list[ModelSpec], seed: int
) -> None:
    """The fit is the nearest one to what was seen, among those with nothing negative. The truth is
    such a fit too, and the nearest one to itself. A projection onto a convex set brings no two
    points further apart. So weighted squares of errors sum up to no more than those of the noise.
    The beliefs count as two samples more. And more bytes never take less."""
    chance, loads = random.Random(seed), LoadTime()
    noise = 0.1 * (fixed_s - 0.2) ** 2 + 0.1 * (1 / gb_per_s - 1e9 / LOAD_BYTES_PER_S) ** 2
    weights = dict.fromkeys((one.id for one in mix), 0.0)
    for number in range(80):
        one = mix[number % len(mix)]
        right_s = fixed_s + one.weight_bytes / gb_per_s / 1e9
        took_s = seen(right_s * chance.uniform(0.9, 1.1), chance)
        loads.learn(one, took_s)
        spread_s = 0.2 * one.weight_bytes / LOAD_BYTES_PER_S
        weight = 0.95 ** (79 - number) * 0.25**2 / (0.25**2 + spread_s**2)
        weights[one.id] += weight
        noise += weight * (took_s - right_s) ** 2
    errors = 0.0
    for one in mix:
        right_s = fixed_s + one.weight_bytes / gb_per_s / 1e9
        errors += weights[one.id] * (loads.of(one) - right_s) ** 2
    assert errors <= noise * (1 + 1e-6)
    assert 0.0 <= loads.of(TINY) <= loads.of(SMALL) <= loads.of(LARGE)


def test_a_link_that_becomes_slower_is_followed() -> None:
    loads = LoadTime()
    for rate in (10e9, 1e9):
        for number in range(60):
            one = (SMALL, LARGE)[number % 2]
            loads.learn(one, 0.3 + one.weight_bytes / rate)
    assert loads.of(LARGE) == pytest.approx(16.3, rel=0.15)


def test_a_load_ends_between_two_reports() -> None:
    """In the middle between them, as far as is known. It does not end before it began."""
    loads = LoadTime()
    book = NodeBook(FleetNode("n", "cpu", 1, 10**12), loads)
    specs = {SMALL.id: SMALL}
    for number in range(100):
        began_s = 10.0 * number
        book.report(NodeReport("n"), specs, began_s - 0.1)
        book.loading[SMALL.id] = began_s
        book.report(NodeReport("n", (), (SMALL.id,)), specs, began_s + 4.0)
        book.report(NodeReport("n", (SMALL.id,)), specs, began_s + 6.0)
    assert loads.of(SMALL) == pytest.approx(5.0, rel=0.05)
