"""Overload in simulation: answers within their SLO per second at multiples of what can be done.

python benchmarks/overload_simulated.py [--seeds 3] [--seconds 20] [--loads 0.5,1,2,4,10]
    [--out FILE]

One GPU (h200-x1) serves four models of 1B parameters. Its event loop takes time for each request
and token (`sim.world.front_end`). Open loops offer multiples of the capacity and never wait. Closed
loops have as many users as offer that much if none were refused; they ask again when a refusal says
so, or at once. Shares are of the best of all loads of the seed and the kind of client.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

from report import report

from c2cserve.policy.baselines.presets import C2CSERVE
from c2cserve.sim.world.front_end import FrontEnd, FrontEndSimulation, Users
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import SimModel, catalogue
from c2cserve.sim.world.simulation import Settings

KINDS = ("open", "patient", "impatient")
_MODELS = "llama-3.2-1b*4"
_BATCH = 16
_PROMPT, _OUTPUT = 512, 160
_FROM_S = 3.0
"""What ends before is not counted: an overload must be noticed first."""


def _draw(models: list[SimModel], random: Random, now: float) -> SimRequest:
    output = random.randint(_OUTPUT // 2, _OUTPUT * 3 // 2)
    return SimRequest(now, random.choice(models).spec.id, _PROMPT, output)


def _open_loop(
    models: list[SimModel], per_s: float, seconds: float, random: Random
) -> list[SimRequest]:
    now, made = 0.0, list[SimRequest]()
    while (now := now + random.expovariate(per_s)) < seconds:
        made.append(_draw(models, random, now))
    return made


def simulate(
    kind: str, per_s: float, seconds: float, seed: int, *, stall_s: float = 0.0
) -> dict[str, Any]:
    """Return what one load comes to. `per_s`: requests that clients offer."""
    models = catalogue(_MODELS)
    machine = build("h200-x1", SliceSettings(max_batch=_BATCH), C2CSERVE)
    random = Random(seed)
    requests = _open_loop(models, per_s, seconds, random) if kind == "open" else []
    # A user asks again a second or so after it asked, if none is refused.
    users = None if kind == "open" else Users(
        max(1, round(per_s)), seconds, lambda rng, now: _draw(models, rng, now), kind == "patient",
    )  # fmt: skip
    simulation = FrontEndSimulation(
        machine, models, requests, Settings(seed=seed, noise=0.1, lookahead=1),
        FrontEnd(stall_s=stall_s), users,
    )  # fmt: skip
    simulation.run()
    counted = [
        one for one in simulation.requests.ended
        if _FROM_S <= one.request.arrival_s < seconds
    ]  # fmt: skip
    met = sum(map(simulation.in_time, counted))
    answered = sum(one.ending == "finished" for one in counted)
    span_s = seconds - _FROM_S
    waits = sorted(simulation.refusals_s)
    return {
        "asked_per_s": round(len(counted) / span_s, 1), "met_per_s": round(met / span_s, 1),
        "late_per_s": round((answered - met) / span_s, 1),
        "refusal_p99_ms": round(1e3 * waits[len(waits) * 99 // 100], 1) if waits else None,
    }  # fmt: skip


def capacity(seconds: float, seed: int, stall_s: float) -> float:
    """Return the most answers in time per second, of open loops ever faster."""
    best, per_s = 0.0, 8.0
    while True:
        met = simulate("open", per_s, seconds, seed, stall_s=stall_s)["met_per_s"]
        if met < 0.8 * per_s:
            return max(best, met)
        best, per_s = max(best, met), per_s * 1.25


def study(seeds: int, seconds: float, loads: list[float], stall_s: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        able = capacity(seconds, seed, stall_s)
        for kind in KINDS:
            own = [
                {"seed": seed, "clients": kind, "load": load,
                 **simulate(kind, load * able, seconds, seed, stall_s=stall_s)}
                for load in loads
            ]  # fmt: skip
            best = max(row["met_per_s"] for row in own)
            for row in own:
                row["of_best"] = round(row["met_per_s"] / best, 3)
                print(json.dumps(row), flush=True)
            rows += own
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loads", default="0.5,1,2,4,10")
    parser.add_argument("--stall", type=float, default=0.0, help="mean stall of the loop, seconds")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    loads = [float(load) for load in given.loads.split(",")]
    rows = study(given.seeds, given.seconds, loads, given.stall)
    report(rows, given.out, show=False, seeds=given.seeds, seconds=given.seconds, stall=given.stall)


if __name__ == "__main__":
    main()
