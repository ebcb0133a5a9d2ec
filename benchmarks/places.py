"""How many requests of the 13B functions load places for weights allow, simulated and estimated.

python benchmarks/places.py [--seed 0] [--jobs 2] [--out FILE]

*Simulated*: c2cserve as in `policy_ratios.py`, where the GPUs of SLINFER's testbed have as much
memory as they have, or more. So it shows what one more place for a model is worth that costs
nothing: no scheme that moves weights in and out of a full memory can be better than that.

*Estimated*: a packing that knows all requests. A model asks for a place from a request's arrival
until its answer is over, and overlapping ones share it. The models of a GPU take turns: prompts and
tokens take as long as published, times the models on the GPU. CPUs have a place each. These busy
periods are packed into places by requests per second, the densest first. Nothing is lost to gaps,
loads, KV, or prompts that delay decodes, so a server does less well. It is an estimate, no strict
bound: no request is delayed so that it shares a place with others.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from c2cserve.sim import compiled

LOAD = "functions, 128 of 13B, testbed"
TABLE = "slinfer_a100_xeon6462c.json"
GROUPS = (("8 most asked", 0, 8), ("next 8", 8, 16), ("next 16", 16, 32), ("others", 32, 128))
MEMORY_GB = (80, 97, 106)
"""Of a GPU: as it is; a third model beside the KV that there is; and beside all room for KV."""
_GPUS = _CPUS = 4


def simulate(memory_gb: int, seed: int) -> dict[str, Any]:
    """Return the requests in time by how much their models are asked, and where they ran."""
    from ratio_loads import LOADS, machine_of, simulation_of

    from c2cserve.sim.studies.slinfer import met

    load = LOADS[LOAD]
    machine = machine_of(load, "c2cserve")
    size = memory_gb * 10**9
    slices = [
        replace(one, slice=replace(
            one.slice, hbm_bytes=size, kv_bytes=size // one.slice.slab_bytes * one.slice.slab_bytes
        )) if one.slice.kind == "gpu" else one
        for one in machine.slices
    ]  # fmt: skip
    simulation = simulation_of(load, "c2cserve", seed, replace(machine, slices=tuple(slices)))
    simulation.run()
    ended = simulation.requests.ended
    asked: dict[str, int] = defaultdict(int)
    for one in ended:
        asked[one.request.model] += 1
    rank = {name: at for at, name in enumerate(sorted(asked, key=lambda n: (-asked[n], n)))}
    rows: list[dict[str, Any]] = []
    for group, first, last in GROUPS:
        here = [one for one in ended if first <= rank[one.request.model] < last]
        served = [one for one in here if met(one)]
        rows.append({
            "models": group, "requests": len(here), "in_time": len(served),
            "on_cpus": sum(one.slice_id.startswith("cpu") for one in served),
            "never_placed": sum(one.dispatched_s < 0 for one in here),
        })  # fmt: skip
    busy = [one.use for name, one in simulation.slices.items() if name.startswith("gpu")]
    return {
        "memory_gb": memory_gb, "requests": len(ended), "in_time": sum(map(met, ended)),
        "gpu_busy": sum(use.busy_s for use in busy) / sum(use.held_s for use in busy),
        "groups": rows,
    }  # fmt: skip


Period = tuple[float, int, str]
"""Seconds, requests, model."""


def _periods(
    requests: Sequence[Any], kind: str, models: int, batch: int
) -> dict[Period, list[Any]]:
    """Return the busy periods of one model, and their requests."""
    from c2cserve.policy.cluster.quantify import Line

    text = (files("c2cserve.sim") / "data" / "tables" / TABLE).read_text()
    times: Mapping[str, Any] = json.loads(text)["models"]["llama-2-13b"][f"{kind}:{kind}"]
    prefill = Line((float(x), float(ms)) for x, ms in times["prefill_ms"])
    token_ms = Line((float(x), float(ms)) for x, ms in times["decode_ms"]["1024"]).at(batch)
    found: list[tuple[float, float, list[Any]]] = []
    for one in sorted(requests, key=lambda r: r.arrival_s):
        end_s = one.arrival_s + models * (prefill.at(one.prompt) + token_ms * one.output) / 1000
        if found and one.arrival_s <= found[-1][1]:
            begin_s, last_s, those = found[-1]
            found[-1] = begin_s, max(last_s, end_s), [*those, one]
        else:
            found.append((one.arrival_s, end_s, [one]))
    return {(e - b, len(those), f"{those[0].model} {b}"): those for b, e, those in found}


def pack(by_model: Mapping[str, Sequence[Any]], kind: str, places: int, models: int) -> Any:
    """Return the share of places asked for, the requests that places serve, and the others."""
    periods: dict[Period, list[Any]] = {}
    for requests in by_model.values():
        periods |= _periods(requests, kind, models, 4 if kind == "gpu" else 8)
    span_s = max(one.arrival_s for those in periods.values() for one in those)
    asked = sum(seconds for seconds, _, _ in periods) / span_s
    room_s, served, left = places * span_s, 0.0, defaultdict[str, list[Any]](list)
    for period in sorted(periods, key=lambda p: (-p[1] / p[0], p[2])):
        seconds, count, _ = period
        part = min(1.0, room_s / seconds)
        room_s -= part * seconds
        served += part * count
        if part < 1.0:
            left[periods[period][0].model] += periods[period]
    return asked, served, left


def estimate(models: int, seed: int) -> dict[str, Any]:
    """Return what a packing serves that knows all requests, with so many models on a GPU."""
    from ratio_loads import LOADS

    from c2cserve.sim.workload.build import workload
    from c2cserve.sim.world.shapes import catalogue, interleaved

    load = LOADS[LOAD]
    names = interleaved(catalogue(load.catalog))
    by_model: dict[str, list[Any]] = defaultdict(list)
    for one in workload(replace(load.workload, seed=seed), names):
        by_model[one.model].append(one)
    asked, on_gpus, left = pack(by_model, "gpu", models * _GPUS, models)
    _, on_cpus, _ = pack(left, "cpu", _CPUS, 1)
    return {
        "models_on_a_gpu": models, "places_asked": asked, "on_gpus": round(on_gpus),
        "on_cpus": round(on_cpus), "served": round(on_gpus + on_cpus),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    policies = compiled.status() if compiled.use() else "pure Python"
    from report import report

    with ProcessPoolExecutor(options.jobs) as pool:
        seeds = [options.seed] * len(MEMORY_GB)
        simulated = list(pool.map(simulate, MEMORY_GB, seeds))
    estimated = [estimate(models, options.seed) for models in (2, 3)]
    report({"simulated": simulated, "estimated": estimated}, options.out, seed=options.seed,
           policies=policies)  # fmt: skip


if __name__ == "__main__":
    main()
