"""The loads of `simulator_speed.py`."""

import time
from collections.abc import Iterator
from dataclasses import replace

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


def cases(n: int, seed: int, only: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """Run each load of `simulator_speed.py` with about `n` requests, or one of them."""
    large, few = "llama-3.1-8b*256", max(1, n // 10)
    loads = {
        "served": lambda: case(build("h200-x4"), "llama-3.2-3b*128", 5 * n, 5.0, seed),
        "catalogue": lambda: case(many_slices(), large, n, 20.0, seed),
        "busy": lambda: case(many_slices(), large, n, 400.0, seed),
        "streams": lambda: case(build("gh200:mig7"), "llama-3.2-3b*128", n, 1.0, seed),
        "single_steps": lambda: case(many_slices(), large, few, 20.0, seed, lookahead=1),
    }
    for name, run in loads.items():
        if only in ("", name):
            yield name, run()
