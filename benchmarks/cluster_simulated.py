"""A fleet of 1,000 simulated nodes: how long decisions take, and how many answers are in time.

python benchmarks/cluster_simulated.py [--part decisions|load|overload|catalogue] [--out FILE]

`decisions`: what the policy takes for a request, while nodes report, requests end and nodes are
lost. `load`: what share of first tokens is in time at a load that 0.8 of the nodes hold, while
nodes are lost. `overload`: that share above what nodes can compute, where they refuse what would be
late, as servers do. `catalogue`: the requests of that part there, to simulated nodes,
and others by the same law.
"""

import argparse
import random
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from report import report

sys.path.append(str(Path(__file__).parent.parent / "tests/cpu/policy"))

from fleet_world import FleetWorld, spec

_NODE_PER_S = 4 / 0.6
"""Requests that a node of four slices can answer: a prompt takes 0.6 s."""
_WARM_S = 18.0
"""Simulated: pools are empty at the start, and nodes' costs unknown. Requests count after it."""


def decisions(
    nodes: int = 1000, models: int = 10_000, requests: int = 4000, losses: int = 20
) -> dict[str, Any]:
    """Time each arrival and each loss, in processor time, while nodes report and requests end. A
    loss takes several decisions; `loss_most_ms` is the longest of them, `loss_whole_most_ms` the
    sum."""
    chance = random.Random(1)
    world = FleetWorld([spec(f"m{i}") for i in range(models)], nodes, 20 * 10**9)
    first = len(world.ticks_s)
    weights = [1.0 / rank for rank in range(1, models + 1)]
    times_s: list[float] = []
    losses_s: list[float] = []
    wholes_s: list[float] = []
    for number, model in enumerate(chance.choices(list(world.models), weights, k=requests)):
        if number % (requests // losses) == requests // losses // 2:
            busy = {name: len(node.running) for name, node in world.nodes.items()}
            before = len(world.ticks_s)
            world.lose(max(busy, key=busy.__getitem__))
            losses_s.append(max(world.ticks_s[before:]))
            wholes_s.append(sum(world.ticks_s[before:]))
        before = len(world.ticks_s)
        world.arrive(f"r{number}", model)
        times_s.append(world.ticks_s[before])
        if number % 4 == 0:
            world.at(world.now + 0.001, f"n{number // 4 % nodes}")
        world.run_until(world.now + chance.expovariate(nodes))
        world.stream.clear()
    times_s.sort()
    all_s = sorted(world.ticks_s[first:])
    late = sum(after_s > 2.0 for after_s in world.begun_s.values())
    return {
        "nodes": nodes, "models": models, "requests": requests, "nodes_lost": losses,
        "arrival_p50_ms": median(times_s) * 1e3,
        "arrival_p99_ms": times_s[int(0.99 * len(times_s))] * 1e3,
        "loss_p50_ms": median(losses_s) * 1e3, "loss_most_ms": max(losses_s) * 1e3,
        "loss_whole_most_ms": max(wholes_s) * 1e3,
        "decisions": len(all_s), "decision_p99_ms": all_s[int(0.99 * len(all_s))] * 1e3,
        "decision_most_ms": all_s[-1] * 1e3,
        "late_first_tokens": late,
    }  # fmt: skip


def in_time(
    nodes: int,
    rate: float,
    seconds: float,
    losses: int,
    models: int = 10_000,
    *,
    refusing: bool = False,
) -> dict[str, Any]:
    """Return what share of first tokens come within their target of 2 s, and what decisions take.

    A prompt of 200 tokens occupies one of a node's four slices for 0.6 s, so a node answers at most
    6.7 requests a second. A request that is refused is not in time."""
    chance = random.Random(2)
    specs = [spec(f"m{i}") for i in range(models)]
    world = FleetWorld(specs, nodes, 20 * 10**9, prompt_token_s=0.003, refusing=refusing)
    weights = [1.0 / rank for rank in range(1, models + 1)]
    names = chance.choices([one.id for one in specs], weights, k=int(rate * seconds))
    times_s: list[float] = []
    reported = 0.0
    for number, model in enumerate(names):
        before = len(world.ticks_s)
        world.arrive(f"r{number}", model)
        times_s.append(world.ticks_s[before])
        while reported < world.now:  # each node twice a second, spread evenly
            reported += 0.5 / nodes
            world.at(world.now, f"n{int(reported * 2 * nodes) % nodes}")
        if losses and number % (len(names) // losses) == len(names) // losses // 2:
            world.lose(chance.choice(sorted(world.nodes)))
        world.run_until(world.now + chance.expovariate(rate))
        world.stream.clear()
    world.run_until(world.now + 30.0)
    world.stream.clear()
    times_s.sort()
    begun = [
        world.begun_s.get(name, float("inf")) for name, one in world.requests.items()
        if one.arrival_s >= _WARM_S
    ]  # fmt: skip
    return {
        "nodes": nodes, "requests_per_s": rate, "requests": len(names), "nodes_lost": losses,
        "refused": len(world.refused), "in_time": sum(s <= 2.0 for s in begun) / len(begun),
        "arrival_p50_ms": median(times_s) * 1e3,
        "arrival_p99_ms": times_s[int(0.99 * len(times_s))] * 1e3,
    }  # fmt: skip


def held_load(nodes: int = 1000, seconds: float = 24.0) -> dict[str, Any]:
    """Find the highest load that 0.8 of the nodes hold, and put it on all of them while 20 are
    lost."""
    fewer, tried = int(0.8 * nodes), list[dict[str, Any]]()
    for share in (0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5):
        rate = share * fewer * _NODE_PER_S
        tried.append(in_time(fewer, rate, seconds, 0))
        if tried[-1]["in_time"] >= 0.95:
            break
    rate = tried[-1]["requests_per_s"]
    return {"fewer_nodes": tried, "all_nodes": in_time(nodes, rate, seconds, 20)}


def overload(nodes: int = 100, models: int = 1250, seconds: float = 24.0) -> dict[str, Any]:
    """Ask for more than the nodes can compute."""
    shares = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
    per_s = nodes * _NODE_PER_S
    found = dict[str, Any]()
    for share in shares:
        one = in_time(nodes, share * per_s, seconds, 0, models, refusing=True)
        found[f"{share:g}"] = one | {"of_what_is_possible": one["in_time"] * max(1.0, share)}
    return found


_SIZES = (1_261_568, 1_191_936, 1_642_496, 1_196_032)
"""Bytes of the specialists' weights."""
_ANSWER_S, _LOAD_S = 0.066, 0.04
"""Medians of a live run."""
_STEP_S = 0.005


def catalogue_requests(names: list[str], runs: int, seed: int) -> tuple[list[str], list[str]]:
    """Return models by Zipf's law: those that warm up, and those that count."""
    chance = random.Random(seed)
    weights = [1.0 / rank for rank in range(1, len(names) + 1)]
    return chance.choices(names, weights, k=runs), chance.choices(names, weights, k=2 * runs)


def found_in_a_pool(runs: int, seed: int) -> dict[str, float]:
    """Send a live run's requests, four at a time. `most`: the share of any rule that loads what is
    asked for: the 17 most popular models stay, and one slot is for the rest."""
    specs = [spec(f"m{i}", _SIZES[i % 4]) for i in range(24)]
    world = FleetWorld(specs, 3, 8 << 20, seed, 2e-3, answer_s=_ANSWER_S, load_s=_LOAD_S)
    names = [one.id for one in specs]
    warm, asked = catalogue_requests(names, runs, seed)
    todo, first, loads_before = [*names, *warm, *asked], len(names) + len(warm), 0
    before, reported = dict[str, set[str]](), 0.0
    for number, model in enumerate(todo):
        while world.running == 4 or (number == first and world.running):
            world.run_until(world.now + _STEP_S)
            held = {name: set(node.pool) for name, node in world.nodes.items()}
            due = world.now - reported >= 0.5
            reported = world.now if due else reported
            for name in (one for one in held if due or held[one] != before.get(one)):
                world.at(world.now, name)
            before = held
        if number == first:
            loads_before = world.loads
        world.arrive(f"r{number}", model, 12)
    rare = [one for one in asked if one not in names[:17]]
    changes = sum(a != b for a, b in zip(rare, ["", *rare], strict=False))
    loads = world.loads - loads_before
    return {"found": 1.0 - loads / len(asked), "most": 1.0 - changes / len(asked)}


def catalogue(runs: int = 800) -> dict[str, Any]:
    """Simulate the live run's requests (seed 0), and those of forty other seeds, on which no rule
    was chosen."""
    others = [found_in_a_pool(runs, seed) for seed in range(200, 240)]
    return {
        "requests": 2 * runs, "live_run": found_in_a_pool(runs, 0),
        "others": {key: fmean(one[key] for one in others) for key in ("found", "most")},
        "least_of_others": min(one["found"] for one in others),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", choices=("decisions", "load", "overload", "catalogue"), action="append"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = {
        "decisions": decisions, "load": held_load, "overload": overload, "catalogue": catalogue,
    }  # fmt: skip
    report({one: parts[one]() for one in args.part or parts}, args.out)


if __name__ == "__main__":
    main()
