"""What a better machine does for the share of requests in time: means over seeds, as JSON.

python benchmarks/machine_scaling.py [--case NAME ...] [--seeds N] [--requests N] [--first-seed N]
                                     [--factors link=1.85,4 hbm=2 gpu=2 ...] [--policy NAME]
                                     [--catalog C --hardware H --trace T --slo S] [--processes N]
                                     [--out FILE]

  a100     64 models of 13B on four A100s and four CPUs, two requests a second by Zipf's law
  a100x1   8 models of 13B with equal load on the same machine's first GPU alone
  h200     100 models of 13B on one H200 whose host has memory for all of them

Each point of a case has one resource multiplied: `link` (rate of links and loads), `hbm` (memory
of slices) or `gpu` (speed of all steps on GPUs). A request is in time if it finished, and its first
token and its mean time per token were within its targets. `worst` is the least share of any point
minus that of the machine as it is. `least_model` is the share of the model with the least, over all
seeds, over the mean of models: it is given where models have equal load."""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from report import report

from c2cserve.sim.planning.bottleneck import RESOURCES, faster_gpus
from c2cserve.sim.report import in_time, on_pace
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.hardware import SimMachine, SliceSettings, build

FACTORS = {"link": (1.85, 4.0), "hbm": (1.5, 2.0), "gpu": (1.5, 2.0)}
SCALES: dict[str, Callable[[SimMachine, float], SimMachine]] = {
    "link": RESOURCES["link"],
    "hbm": RESOURCES["HBM"],
    "gpu": faster_gpus,
}


@dataclass(frozen=True, slots=True)
class Case:
    hardware: str
    catalog: str
    trace: str
    slo: str
    only: str = ""
    """The one slice that the machine has, or all of them."""
    pool_bytes: int = 0
    """The host's memory for models, if not the machine's own."""
    equal_load: bool = False
    policy: str = "c2cserve"
    max_active: int = 8


CASES = {
    "a100": Case(
        "a100x4+xeon6462cx4", "llama-2-13b*64", "synthetic:rate=2,duration=1e4", "slinfer"
    ),
    "a100x1": Case(
        "a100x4+xeon6462cx4", "llama-2-13b*8",
        "synthetic:rate=0.35,duration=1e5,sources=8,zipf=0", "slinfer", only="gpu0",
        equal_load=True,
    ),
    "h200": Case(
        "h200-x1", "llama-2-13b*100", "synthetic:rate=1,duration=1e4,sources=100", "slinfer",
        pool_bytes=1 << 42,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    resource: str
    factor: float
    seed: int
    requests: int


def run(case: Case, point: Point) -> dict[str, tuple[int, int]]:
    """Return each model's requests in time, and all of them."""
    workload = WorkloadSettings(case.trace, seed=point.seed, limit=point.requests)
    scenario = Scenario(
        case.hardware, case.catalog, workload, case.slo, case.policy,
        slices=SliceSettings(max_active=case.max_active), seed=point.seed,
    )  # fmt: skip
    simulation = prepare(scenario, machine=_machine(case, scenario, point))
    simulation.run()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one in simulation.requests.ended:
        met = one.ending == "finished" and in_time(one) and on_pace(one)
        counts[one.request.model][0] += met
        counts[one.request.model][1] += 1
    return {model: (met, count) for model, (met, count) in counts.items()}


def _machine(case: Case, scenario: Scenario, point: Point) -> SimMachine:
    machine = build(case.hardware, scenario.slices)
    if case.only:
        slices = tuple(one for one in machine.slices if one.slice.id == case.only)
        machine = replace(machine, slices=slices)
    if case.pool_bytes:
        machine = replace(machine, hardware=replace(machine.hardware, pool_bytes=case.pool_bytes))
    return SCALES[point.resource](machine, point.factor)


def measure(
    case: Case, factors: dict[str, tuple[float, ...]], seeds: range, requests: int, processes: int
) -> Iterator[dict[str, Any]]:
    """Run all points of a case, and yield what is known after each."""
    kinds = [("link", 1.0), *((name, factor) for name, fs in factors.items() for factor in fs)]
    points = [Point(name, factor, seed, requests) for name, factor in kinds for seed in seeds]
    result: dict[str, Any] = {}
    with ProcessPoolExecutor(processes) as pool:
        outcomes = pool.map(run, [case] * len(points), points)
        for name, factor in kinds:
            label = f"{name} x {factor:g}" if factor != 1.0 else "as it is"
            result[label] = _summary(case, [next(outcomes) for _ in seeds])
            worst = min(one["in_time"] for one in result.values()) - result["as it is"]["in_time"]
            yield {"points": dict(result), "worst": round(worst, 4)}


def _summary(case: Case, outcomes: list[dict[str, tuple[int, int]]]) -> dict[str, float]:
    shares = [sum(m for m, _ in one.values()) / sum(n for _, n in one.values()) for one in outcomes]
    spread = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
    found = {"in_time": round(mean(shares), 4), "standard_error": round(spread, 4)}
    if case.equal_load:
        models: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for one in outcomes:
            for model, (met, count) in one.items():
                models[model][0] += met
                models[model][1] += count
        each = [met / count for met, count in models.values()]
        found["least_model"] = round(min(each) / max(mean(each), 1e-9), 3)
    return found


def _factors(texts: list[str]) -> dict[str, tuple[float, ...]]:
    pairs = (text.partition("=") for text in texts)
    return {name: tuple(map(float, values.split(","))) for name, _, values in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--factors", nargs="+", default=[])
    parser.add_argument("--processes", type=int, default=1)
    for name in ("policy", "hardware", "catalog", "trace", "slo"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    changes = {
        name: value for name in ("policy", "hardware", "catalog", "trace", "slo")
        if (value := getattr(options, name))
    }  # fmt: skip
    factors = _factors(options.factors) or FACTORS
    results: dict[str, Any] = {}
    for name in options.case:
        case = replace(CASES[name], **changes)
        for found in measure(case, factors, seeds, options.requests, options.processes):
            results[name] = found
            report(
                results, options.out, show=False, seeds=[seeds.start, seeds.stop],
                requests=options.requests, factors=factors, changes=changes,
            )  # fmt: skip
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
