"""A fleet near what it can compute, and above: first tokens stay in time on all nodes alike."""

import random

import pytest
from fleet_world import FleetWorld, spec

GB = 1_000_000_000
PROMPT_S = 0.6
"""A prompt of 200 tokens on one of four slices: a node begins 6.7 answers a second."""


def loaded(nodes: int, models: int, share: float, seconds: float = 20.0) -> FleetWorld:
    """Ask for `share` of what the nodes can compute, by Zipf's law, from empty pools on."""
    chance = random.Random(2)
    there = FleetWorld([spec(f"m{i}") for i in range(models)], nodes, 20 * GB, 0, PROMPT_S / 200)
    rate, reported = share * nodes * 4 / PROMPT_S, 0.0
    weights = [1.0 / rank for rank in range(1, models + 1)]
    names = chance.choices(list(there.models), weights, k=int(rate * seconds))
    for number, model in enumerate(names):
        there.arrive(f"r{number}", model)
        while reported < there.now:
            reported += 0.5 / nodes
            there.at(there.now, f"n{int(reported * 2 * nodes) % nodes}")
        there.run_until(there.now + chance.expovariate(rate))
        there.stream.clear()
    there.run_until(there.now + 30.0)
    return there


def in_time(there: FleetWorld, since_s: float) -> float:
    """Return what share of those that came since then had their first token in time."""
    counted = [name for name, one in there.requests.items() if one.arrival_s >= since_s]
    return sum(there.begun_s.get(name, 99.0) <= 2.0 for name in counted) / len(counted)


def test_nodes_hold_nearly_what_they_can_compute() -> None:
    """From two seconds after a start with empty pools and nothing known of nodes."""
    there = loaded(40, 500, 0.95, 12.0)
    assert not there.refused
    assert in_time(there, 2.0) >= 0.97


def test_a_node_that_has_not_answered_yet_is_as_fast_as_others() -> None:
    """Requests that wait for a load tell nothing of the node. Meanwhile it is not taken for one
    that computes any number of prompts at once."""
    there = FleetWorld([spec("m0"), spec("m1")], 10, 4 * GB, 0, PROMPT_S / 200)
    for number in range(3):
        there.arrive(f"warm{number}", "m0")
        there.run_until(there.now + 2.0)
        for name in there.nodes:
            there.at(there.now, name)
    for number in range(60):
        there.arrive(f"r{number}", "m1")
        there.run_until(there.now + 0.005)
    there.run_until(60.0)
    assert in_time(there, 5.0) >= 0.9


@pytest.mark.parametrize("model", [f"m{i}" for i in range(8)])
def test_an_idle_node_is_found_wherever_it_stands(model: str) -> None:
    """Popular models must not all search the same neighbours in the order of nodes."""
    models = [spec(f"m{i}") for i in range(8)]
    there = FleetWorld([*models, *(spec(f"b{i}") for i in range(150))], 200, 20 * GB)
    names = sorted(there.nodes)
    for index, name in enumerate(names[:150]):
        there._load(there.nodes[name], f"b{index}")
        there.at(1.0, name)
    there.run_until(1.0)
    for index in range(150):
        for number in range(8):
            there.arrive(f"b{index}-{number}", f"b{index}", 4000)
    there.arrive("new", model)
    assert there.sent["new"][0] in names[150:]
