"""Nodes of different kinds: a model goes where its targets are met at least cost."""

import random
from collections import Counter

import msgspec
import pytest
from fleet_world import FleetWorld, Kind, spec
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core import events as ev
from c2cserve.core import fleet
from c2cserve.core.request import Slo
from c2cserve.policy.fleet.policy import FleetPolicy
from c2cserve.policy.fleet.speeds import Speeds
from c2cserve.runtime.wire import tagged, untagged

GB = 1_000_000_000
CHEAP = Kind("cpu", 4.0, 1e-3, 0.2)
DEAR = Kind("gpu", 200.0, 1e-5, 0.01)
PATIENT, HASTY = Slo(2.0, 0.5), Slo(1.0, 0.05)


def world(models: dict[str, Slo], cheap: int = 1, dear: int = 1, pool: int = 8 * GB) -> FleetWorld:
    there = FleetWorld([spec(name, slo=slo) for name, slo in models.items()], 0, 0)
    for index in range(cheap):
        there.up(f"c{index}", pool, CHEAP)
    for index in range(dear):
        there.up(f"d{index}", pool, DEAR)
    return there


def settle(there: FleetWorld, seconds: float) -> None:
    """Let loads and requests end; nodes report twice a second."""
    until = there.now + seconds
    while there.now < until:
        for name in there.nodes:
            there.at(there.now, name)
        there.run_until(min(until, there.now + 0.25))
        there.tell()


def ask(there: FleetWorld, model: str, count: int, every_s: float = 1.0) -> list[str]:
    """Return the nodes that the requests were sent to."""
    names = [f"{model}-{len(there.requests)}-{number}" for number in range(count)]
    for name in names:
        there.arrive(name, model)
        settle(there, every_s)
    return [there.sent[name][-1] for name in names]


def test_a_model_that_is_in_time_everywhere_stays_on_cheap_nodes() -> None:
    there = world({"m": PATIENT})
    assert set(ask(there, "m", 30)) == {"c0"}


def test_a_model_whose_tokens_would_be_late_goes_to_a_dear_node() -> None:
    """The cheap one is tried first: nothing is known of it. The next copy is on the dear one."""
    there = world({"m": HASTY})
    assert set(ask(there, "m", 30)[8:]) == {"d0"}


def test_a_model_is_not_tried_where_others_of_its_size_are_too_slow() -> None:
    there = world({"m": HASTY, "n": HASTY})
    ask(there, "m", 10)
    assert set(ask(there, "n", 10)) == {"d0"}


def test_a_smaller_model_may_be_fast_enough_on_a_cheap_node() -> None:
    there = world({"m": HASTY})
    ask(there, "m", 10)
    small = spec("s", GB // 20, slo=HASTY)
    there.models["s"] = small
    there.tell(ev.ModelAdded(small))
    assert ask(there, "s", 1) == ["c0"]


def test_a_late_prompt_goes_to_a_dear_node() -> None:
    there = world({"m": Slo(0.15, 0.5)})
    assert set(ask(there, "m", 30)[8:]) == {"d0"}


def test_an_overload_of_cheap_nodes_goes_to_dear_ones_and_ends() -> None:
    there = world({"m": PATIENT})
    ask(there, "m", 5)
    crowd = ask(there, "m", 400, 0.02)
    assert set(crowd) == {"c0", "d0"}
    settle(there, 60.0)
    assert set(ask(there, "m", 10)) == {"c0"}


def test_a_model_that_found_room_on_a_dear_node_only_moves_when_there_is_some() -> None:
    there = world({"a": PATIENT, "b": PATIENT}, pool=GB)
    assert set(ask(there, "a", 3)) == {"c0"}
    assert set(ask(there, "b", 3)) == {"d0"}
    there.tell(ev.ModelRemoving("a"))
    there.nodes["c0"].pool.pop("a")
    assert set(ask(there, "b", 10)[4:]) == {"c0"}


def test_when_a_cheap_node_is_lost_its_models_are_served_by_dear_ones() -> None:
    there = world({"m": PATIENT})
    ask(there, "m", 3)
    there.lose("c0")
    assert set(ask(there, "m", 3)) == {"d0"}


def test_what_was_measured_long_ago_is_forgotten() -> None:
    speeds, one = Speeds(), spec("m")
    speeds.note(fleet.Speed("m", 1.0, 2.0), one, 0.0)
    assert speeds.of(one, 500.0) == (1.0, 2.0)
    assert speeds.of(spec("half", GB // 2), 500.0) == (0.5, 1.0)
    assert speeds.of(one, 700.0) == (0.0, 0.0)


def test_a_busy_step_says_less_than_a_fast_one() -> None:
    speeds, one = Speeds(), spec("m")
    speeds.note(fleet.Speed("m", 0.0, 1.0), one, 0.0)
    speeds.note(fleet.Speed("m", 0.0, 2.0), one, 1.0)
    assert speeds.of(one, 1.0)[1] == pytest.approx(1.2)
    speeds.note(fleet.Speed("m", 0.0, 0.5), one, 2.0)
    assert speeds.of(one, 2.0)[1] == 0.5


@given(
    costs=st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_requests_go_to_the_cheapest_nodes_while_these_are_in_time(
    costs: list[float], seed: int
) -> None:
    """Whatever the nodes cost, and whatever the order of models: none is refused or left out, a
    record replays, and a fleet with room for all serves all at the least price."""
    chance = random.Random(seed)
    there = FleetWorld([spec(f"m{i}", slo=PATIENT) for i in range(4)], 0, 0)
    for index, cost in enumerate(costs):
        there.up(f"n{index}", 4 * GB, Kind(f"k{cost}", cost, 1e-4, 0.01))
    for _ in range(12):
        ask(there, chance.choice([*there.models]), 1, 0.5)
    settle(there, 5.0)
    assert not there.refused
    assert there.ended == set(there.requests)
    used = Counter(there.nodes[sent[-1]].node.cost for sent in there.sent.values())
    assert set(used) == {min(costs)}
    policy = FleetPolicy()
    for now, events, actions in there.stream:
        for event in untagged(msgspec.json.decode(msgspec.json.encode(tagged(events)))):
            policy.apply(event)
        assert list(policy.decide(now)) == actions


@given(st.permutations([("c0", CHEAP), ("c1", CHEAP), ("d0", DEAR), ("d1", DEAR)]))
def test_the_order_in_which_nodes_came_does_not_matter(order: list[tuple[str, Kind]]) -> None:
    there = FleetWorld([spec(f"m{i}", slo=PATIENT) for i in range(6)], 0, 0)
    for name, kind in order:
        there.up(name, 8 * GB, kind)
    for model in there.models:
        there.arrive(f"r-{model}", model)
    other = FleetWorld([spec(f"m{i}", slo=PATIENT) for i in range(6)], 0, 0)
    for name, kind in sorted(order):
        other.up(name, 8 * GB, kind)
    for model in other.models:
        other.arrive(f"r-{model}", model)
    assert there.sent == other.sent
