"""A fleet of 1,000 simulated nodes: how long decisions take, and how many answers are in time.

python benchmarks/cluster_simulated.py [--part decisions|load] [--out FILE]

`decisions`: what the policy takes for a request, while nodes report and requests end. `load`: what
share of first tokens is in time at a load that 0.8 of the nodes hold, while nodes are lost.
`cluster.py` has these parts too.
"""

import argparse
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

from report import report

sys.path.append(str(Path(__file__).parent.parent / "tests/cpu/policy"))

from fleet_world import FleetWorld, spec

_WARM_S = 18.0
"""Simulated: pools are empty at the start, and nodes' costs unknown. Requests count after it."""


def decisions(nodes: int = 1000, models: int = 10_000, requests: int = 4000) -> dict[str, Any]:
    """Time each arrival, in processor time, while nodes report and requests end."""
    chance = random.Random(1)
    world = FleetWorld([spec(f"m{i}") for i in range(models)], nodes, 20 * 10**9)
    weights = [1.0 / rank for rank in range(1, models + 1)]
    times_s: list[float] = []
    for number, model in enumerate(chance.choices(list(world.models), weights, k=requests)):
        before = len(world.ticks_s)
        world.arrive(f"r{number}", model)
        times_s.append(world.ticks_s[before])
        if number % 4 == 0:
            world.at(world.now + 0.001, f"n{number // 4 % nodes}")
        world.run_until(world.now + chance.expovariate(nodes))
    times_s.sort()
    late = sum(after_s > 2.0 for after_s in world.begun_s.values())
    return {
        "nodes": nodes, "models": models, "requests": requests,
        "arrival_p50_ms": median(times_s) * 1e3,
        "arrival_p99_ms": times_s[int(0.99 * len(times_s))] * 1e3,
        "late_first_tokens": late,
    }  # fmt: skip


def in_time(
    nodes: int, rate: float, seconds: float, losses: int, models: int = 10_000
) -> dict[str, Any]:
    """Return what share of first tokens come within their target of 2 s, and what decisions take.

    A prompt of 200 tokens occupies one of a node's four slices for 0.6 s, so a node answers at most
    6.7 requests a second."""
    chance = random.Random(2)
    specs = [spec(f"m{i}") for i in range(models)]
    world = FleetWorld(specs, nodes, 20 * 10**9, prompt_token_s=0.003)
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
    for share in (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5):
        rate = share * fewer * 4 / 0.6
        tried.append(in_time(fewer, rate, seconds, 0))
        if tried[-1]["in_time"] >= 0.95:
            break
    rate = tried[-1]["requests_per_s"]
    return {"fewer_nodes": tried, "all_nodes": in_time(nodes, rate, seconds, 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("decisions", "load"), action="append")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = {"decisions": decisions, "load": held_load}
    report({one: parts[one]() for one in args.part or parts}, args.out)


if __name__ == "__main__":
    main()
