"""Shared links against closed forms, and against what sharing means."""

from functools import partial
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.sim.world.links import Flow, Network, SharedLink, fair_rates, shared_rates
from c2cserve.sim.world.timeline import Timeline


def run(timeline: Timeline) -> None:
    while timeline.step():
        pass


def test_two_flows_share_and_the_longer_one_gets_all_once_alone() -> None:
    timeline = Timeline()
    network = Network(timeline, [("l", 10.0)])
    ends: dict[str, float] = {}
    for name, size in (("short", 10.0), ("long", 30.0)):
        network.start(("l",), size, inf, lambda n=name: ends.update({n: timeline.now}))
    run(timeline)
    assert ends["short"] == pytest.approx(2.0)  # 10 bytes at 5 a second
    assert ends["long"] == pytest.approx(4.0)  # then 20 at 10 a second
    network.update_totals()
    assert network.links["l"].moved_bytes == pytest.approx(40.0)
    assert network.links["l"].busy_s == pytest.approx(4.0)


def test_what_a_capped_flow_leaves_the_others_get() -> None:
    timeline = Timeline()
    network = Network(timeline, [("l", 10.0)])
    ends: list[float] = []
    network.start(("l",), 4.0, 2.0, lambda: ends.append(timeline.now))
    network.start(("l",), 16.0, inf, lambda: ends.append(timeline.now))
    run(timeline)
    assert ends == pytest.approx([2.0, 2.0])


def test_a_host_link_limits_gpus_that_share_it() -> None:
    timeline = Timeline()
    network = Network(timeline, [("host", 12.0), *((f"g{i}", 5.0) for i in range(4))])
    ends: list[float] = []
    for i in range(4):
        network.start((f"g{i}", "host"), 6.0, inf, lambda: ends.append(timeline.now))
    assert network.links["host"].rate == pytest.approx(12.0)
    run(timeline)
    assert ends == pytest.approx([2.0] * 4)  # 12 / 4 = 3 a second each, not 5


def test_a_slow_link_takes_longer_and_recovers() -> None:
    timeline = Timeline()
    network = Network(timeline, [("l", 10.0)])
    ends: list[float] = []
    network.start(("l",), 20.0, inf, lambda: ends.append(timeline.now))
    timeline.at(1.0, network.set_speed, "l", 2.0)
    timeline.at(2.0, network.set_speed, "l", 10.0)
    run(timeline)
    assert ends == pytest.approx([1.0 + 1.0 + 0.8])


def test_a_stopped_flow_never_ends_and_gives_its_share_back() -> None:
    timeline = Timeline()
    network = Network(timeline, [("l", 10.0)])
    ends: list[str] = []
    gone = network.start(("l",), 100.0, inf, lambda: ends.append("gone"))
    network.start(("l",), 10.0, inf, lambda: ends.append("stays"))
    timeline.at(1.0, network.stop, gone)
    run(timeline)
    assert ends == ["stays"]
    assert timeline.now == pytest.approx(100 / 5, abs=20)
    network.update_totals()
    assert network.links["l"].moved_bytes == pytest.approx(15.0)


@pytest.mark.parametrize("bad", [((), 1.0, 1.0), (("l",), 0.0, 1.0), (("l",), 1.0, 0.0)])
def test_flows_that_would_never_end_are_refused(bad: tuple[tuple[str, ...], float, float]) -> None:
    network = Network(Timeline(), [("l", 1.0)])
    with pytest.raises(ValueError, match="flow"):
        network.start(*bad, lambda: None)


LINKS = st.lists(st.floats(1.0, 100.0), min_size=1, max_size=4)
FLOWS = st.lists(
    st.tuples(st.sets(st.integers(0, 3), min_size=1), st.floats(0.1, 200.0)), min_size=1, max_size=8
)


@given(LINKS, FLOWS)
def test_rates_are_max_min_fair(speeds: list[float], wanted: list[tuple[set[int], float]]) -> None:
    """No link is over its speed, and every flow has its cap or a full link on which nobody has
    more."""
    links = [SharedLink(str(i), speed, speed) for i, speed in enumerate(speeds)]
    flows: list[Flow] = []
    for numbers, cap in wanted:
        route = tuple({links[number % len(links)]: None for number in sorted(numbers)})
        flows.append(Flow(route, 1.0, cap, lambda: None))
        for link in route:
            link.flows[flows[-1]] = None
    for flow, rate in fair_rates(flows, links).items():
        flow.rate = rate
    for link in links:
        assert link.rate <= link.bytes_per_s * (1 + 1e-6)
    for flow in flows:
        full = [
            link for link in flow.route
            if link.rate >= link.bytes_per_s * (1 - 1e-6)
            and all(other.rate <= flow.rate * (1 + 1e-6) for other in link.flows)
        ]  # fmt: skip
        assert flow.rate >= flow.cap * (1 - 1e-6) or full


@given(LINKS, st.lists(st.floats(0.1, 200.0), min_size=1, max_size=8))
def test_flows_of_one_route_get_what_is_fair(speeds: list[float], caps: list[float]) -> None:
    links = [SharedLink(str(i), speed, speed) for i, speed in enumerate(speeds)]
    flows = [Flow(tuple(links), 1.0, cap, lambda: None) for cap in caps]
    for link in links:
        link.flows.update(dict.fromkeys(flows))
    fair = fair_rates(flows, links)
    assert shared_rates(flows, min(speeds)) == [fair[flow] for flow in flows]


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 50.0)), min_size=1, max_size=10))
def test_bytes_are_conserved_and_the_link_is_never_idle_in_vain(
    starts: list[tuple[float, float]],
) -> None:
    timeline = Timeline()
    network = Network(timeline, [("l", 10.0)])
    ends: list[float] = []

    def begin(size: float) -> None:
        network.start(("l",), size, inf, partial(lambda: ends.append(timeline.now)))
        assert network.links["l"].rate <= 10.0 * (1 + 1e-6)

    for at_s, size in starts:
        timeline.at(at_s, begin, size)
    run(timeline)
    network.update_totals()
    link = network.links["l"]
    total = sum(size for _, size in starts)
    assert len(ends) == len(starts)
    assert link.moved_bytes == pytest.approx(total, rel=1e-6)
    assert link.busy_s == pytest.approx(total / 10.0, rel=1e-6)
