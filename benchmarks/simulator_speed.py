"""How fast the simulator is, on one core: requests, loop ticks and decode steps per second: JSON.

python benchmarks/simulator_speed.py [--requests N] [--seed N] [--out FILE]

  served         what a user would simulate: 128 models of 3B on four H200s, which hold a part of
                 them, 5 requests a second by Zipf's law, prompts of 400 and answers of 150 tokens,
                 all in time; five times the requests of the others
  catalogue      256 models of 8B on 64 slices that hold their weights, a few requests each
  busy           the same slices with batches of tens
  streams        128 models of 3B on seven small slices whose weights come over one link
  single_steps   a tenth of `catalogue` with every decode step decided and simulated on its own

All with the default preset. Invariants are checked throughout. CPU time is that of this process.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from report import report

from c2cserve.sim.report import report as outcome
from c2cserve.sim.run import slo_rule
from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.world.hardware import SimMachine, SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings, Simulation

SLICES = 64


def many_slices() -> SimMachine:
    """Slices like one H200 whose weights are in its own memory: no link, so that the loops are
    measured and not the link's arithmetic."""
    one = build("h200-x1", SliceSettings(max_active=8))
    simulated = one.slices[0]
    slices = tuple(
        replace(
            simulated, node=f"n{number}", h2d=(), d2h=(),
            slice=replace(simulated.slice, id=f"n{number}", link="", link_bytes_per_s=0.0),
        )
        for number in range(SLICES)
    )  # fmt: skip
    hardware = replace(one.hardware, pool_bytes=16 << 40)
    return replace(one, hardware=hardware, slices=slices)


def case(
    machine: SimMachine, catalog: str, requests: int, rate: float, seed: int, lookahead: int = 64
) -> dict[str, float]:
    models = catalogue(catalog)
    text = f"synthetic:rate={rate},duration={requests / rate},sources={len(models)}"
    trace = WorkloadSettings(f"{text},prompt=400,output=150", seed=seed)
    asked: list[SimRequest] = workload(trace, models)
    settings = Settings(seed=seed, noise=0.05, lookahead=lookahead)
    simulation = Simulation(machine, models, asked, slo_rule("1,0.1"), settings)
    start = time.process_time()
    simulation.run()
    took_s = time.process_time() - start
    result = outcome(simulation)
    steps = sum(node.steps for node in result.nodes.values())
    return {
        "requests": result.requests,
        "tokens": sum(
            tracked.request.prompt_len + tracked.sampled for tracked in simulation.requests.ended
        ),
        "models": len(models),
        "slices": len(machine.slices),
        "cpu_s": round(took_s, 2),
        "us_per_request": round(1e6 * took_s / result.requests, 1),
        "ticks_per_request": round(result.ticks / result.requests, 2),
        "steps_per_request": round(steps / result.requests, 1),
        "steps_per_s": round(steps / took_s),
        "virtual_per_real": round(result.duration_s / took_s, 1),
        "met": round(result.slo_attainment, 4),
        "million_requests_s": round(1e6 * took_s / result.requests, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    n, seed = options.requests, options.seed
    large = "llama-3.1-8b*256"
    results = {
        "served": case(build("h200-x4"), "llama-3.2-3b*128", 5 * n, 5.0, seed),
        "catalogue": case(many_slices(), large, n, 20.0, seed),
        "busy": case(many_slices(), large, n, 400.0, seed),
        "streams": case(build("gh200:mig7"), "llama-3.2-3b*128", n, 1.0, seed),
        "single_steps": case(many_slices(), large, max(1, n // 10), 20.0, seed, lookahead=1),
    }
    report(results, options.out, requests=n, seed=seed)


if __name__ == "__main__":
    main()
