"""A fleet near what it can compute, and above: first tokens stay in time on all nodes alike."""

import random

import pytest
from fleet_world import FleetWorld, spec

GB = 1_000_000_000
PROMPT_S = 0.6
"""A prompt of 200 tokens on one of four slices: a node begins 6.7 answers a second."""


def loaded(
    nodes: int, models: int, share: float, seconds: float, *, refusing: bool = False
) -> FleetWorld:
    """Ask for `share` of what the nodes can compute, by Zipf's law, from empty pools on."""
    chance = random.Random(2)
    specs = [spec(f"m{i}") for i in range(models)]
    there = FleetWorld(specs, nodes, 20 * GB, 0, PROMPT_S / 200, refusing=refusing)
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


@pytest.mark.parametrize("share", [1.1, 1.5, 2.5])
def test_what_is_asked_for_too_much_is_refused_and_the_rest_is_in_time(share: float) -> None:
    """Where nodes refuse what would be late, as servers do. Most of what is refused was offered to
    one node only, and few models leave pools for requests that are late there too."""
    there = loaded(20, 250, share, 12.0, refusing=True)
    assert in_time(there, 4.0) >= 0.95 / share
    begun = [s for name, s in there.begun_s.items() if there.requests[name].arrival_s >= 4.0]
    assert sum(after_s > 2.0 for after_s in begun) <= 0.02 * len(begun)
    assert there.declined - len(there.refused) <= 0.2 * len(there.requests)
    assert there.loads <= 1200


def test_a_model_that_is_refused_gets_another_copy_where_there_is_room() -> None:
    """Also where a load takes longer than the target, so that no request would make one."""
    models = [spec(f"m{i}") for i in range(9)]
    there = FleetWorld(models, 2, 12 * GB, 0, PROMPT_S / 200, load_s=6.0, refusing=True)

    def ask(name: str, model: str, seconds: float) -> None:
        there.arrive(name, model)
        for node in there.nodes:
            there.at(there.now, node)
        there.run_until(there.now + seconds)

    for model in there.models:  # now it is known what loads take
        ask(model, model, 9.0)
    began_s = there.now
    for number in range(400):
        ask(f"r{number}", "m0", 0.1)
    there.run_until(there.now + 60.0)
    assert in_time(there, began_s + 20.0) >= 0.95


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
