"""Steps that are decided ahead and simulated as one event are those of single decisions."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.request import Slo
from c2cserve.sim.world.bursts import Burst
from c2cserve.sim.world.hardware import build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings, Simulation


def ends(
    models: int, lookahead: int, requests: int, gap_s: float
) -> dict[str, tuple[float, float]]:
    names = catalogue(f"llama-3.2-3b*{models}")
    asked = [
        SimRequest(i * gap_s, names[i % models].spec.id, 300 + 40 * i, 30 + 17 * (i % 5))
        for i in range(requests)
    ]
    settings = Settings(lookahead=lookahead)
    slo = Slo(2.0, 0.2)
    world = Simulation(build("h200-x1"), names, asked, lambda prompt: slo, settings)
    world.run()
    return {
        tracked.request.id: (tracked.ttft_s, tracked.last_s) for tracked in world.requests.ended
    }


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("gap_s", [0.13, 0.9])
def test_clients_see_the_same(models: int, gap_s: float) -> None:
    single, ahead = (ends(models, lookahead, 24, gap_s) for lookahead in (1, 64))
    assert single.keys() == ahead.keys()
    for name, (ttft_s, last_s) in single.items():
        assert ahead[name][0] == pytest.approx(ttft_s, abs=0.05)
        # Whose requests are finished first is looked at once in a plan
        # (`policy.weights.weight_swapping`).
        assert ahead[name][1] == pytest.approx(last_s, rel=0.03, abs=0.3)


def streamed(lookahead: int, gap_s: float) -> tuple[dict[str, tuple[float, float]], int]:
    """Of models larger than the memory of their slices, which share a link; and flows on it."""
    names = catalogue("llama-3.1-8b*3")
    asked = [
        SimRequest(i * gap_s, names[i % 3].spec.id, 200 + 40 * i, 30 + 17 * (i % 5))
        for i in range(9)
    ]
    slo = Slo(2.0, 0.2)
    settings = Settings(lookahead=lookahead)
    world = Simulation(build("gh200:mig7"), names, asked, lambda prompt: slo, settings)
    with patch.object(world.network, "start", wraps=world.network.start) as start:
        world.run()
    return {
        tracked.request.id: (tracked.ttft_s, tracked.last_s) for tracked in world.requests.ended
    }, start.call_count


@pytest.mark.parametrize("gap_s", [0.4, 3.0])
def test_clients_see_the_same_where_weights_stream(gap_s: float) -> None:
    (single, many), (ahead, few) = streamed(1, gap_s), streamed(64, gap_s)
    assert single.keys() == ahead.keys()
    for name, times in single.items():
        assert ahead[name] == pytest.approx(times, rel=0.01, abs=0.01)
    assert few < many / 2


COSTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4)


@given(COSTS, st.data())
def test_a_burst_ends_with_the_step_under_way_or_with_the_first_that_has_ended(
    costs: list[float], data: st.DataObject
) -> None:
    number = st.integers(0, len(costs) - 1)
    order = data.draw(st.lists(number, min_size=2, max_size=30))
    remaining = [data.draw(st.integers(1, 40)) for _ in costs]
    burst = Burst(costs, order, remaining)
    counts = [order[: burst.length].count(index) for index in range(len(costs))]
    assert all(count <= most for count, most in zip(counts, remaining, strict=True))
    if burst.length < len(order):
        last = order[burst.length - 1]
        assert counts[last] == remaining[last]
    assert burst.work == pytest.approx(sum(costs[index] for index in order[: burst.length]))
    spans = burst.spans()
    assert [span[0] for span in spans] == counts
    done = data.draw(st.floats(0.0, burst.work))
    before = burst.work
    if burst.cut(done):
        assert done <= burst.work < before
        assert burst.work - costs[order[burst.length - 1]] <= done + 1e-9
