"""`rotation_live.py` in the simulator: the same requests, slice and orders, on any machine. JSON.

python benchmarks/rotation_simulated.py [--rates 4,5,6,7,8] [--kv-gb 2] [--seconds 14]
    [--seeds 1,2,3,4,5] [--beside llama-3b] [--beside-rate 0.5] [--times FILE] [--out FILE]

Step times and speeds are those that `weights_mix.py` measured on an H200 (--times). Each seed has
other requests, and a bar of its own. `--beside` is a second model of the slice that is asked
rarely: its requests are added to those of the first one, and memory has room for both weights.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from catalogue_files import pick
from mix_load import Arena
from mix_machine import earlier_machine
from mix_simulated import simulated_machine, simulated_models
from mix_times import read_times
from report import report
from rotation_live import (
    HOST_KV_BYTES,
    NO_DEADLINE_S,
    ORDERS,
    TBT_S,
    TTFT_S,
    bars,
    figures,
    shapes_of,
)

from c2cserve.bench.loadgen_reply import Record
from c2cserve.bench.plan import Shape
from c2cserve.core.request import Slo
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.requests import SimRequest, TrackedRequest

_TIMES = Path(__file__).parent / "results" / "weights_mix_h200_eleventh.json"
_FIRST = "llama-8b"
Rows = list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    measured = json.loads(given.times.read_text())["results"]
    rows: Rows = []
    found: Rows = []
    for seed in given.seeds:
        given.seed = seed
        own: Rows = []
        for order in given.orders:
            for rate in given.rates:
                row = {"seed": seed, "order": order, "rate": rate}
                own.append(row | _run(given, measured, order, rate))
                print(own[-1], flush=True)
        rows += own
        found += [{"seed": seed} | bar for bar in bars(own)]
    results = {"rows": rows, "bars": found, "spread": _spread(found, rows)}
    if given.beside:
        results["models"] = _by_model(rows)
    print(results["spread"], flush=True)
    report(
        results, given.out, kv_gb=given.kv_gb, seconds=given.seconds, seeds=given.seeds,
        ttft_s=TTFT_S, tbt_s=TBT_S, prompt=given.prompt, output=given.output,
        times=given.times.name, beside=given.beside, beside_rate=given.beside_rate,
    )  # fmt: skip


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", default=",".join(ORDERS), help=", ".join(ORDERS))
    parser.add_argument("--rates", default="4,5,6,7,8", help="requests a second")
    parser.add_argument("--kv-gb", type=float, default=2.0, help="beside the weights")
    parser.add_argument("--seconds", type=float, default=14.0, help="of arrivals, for each rate")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens, at most")
    parser.add_argument("--output", type=int, default=512, help="tokens, at most")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--beside", default="", help="the shape of a second model")
    parser.add_argument("--beside-rate", type=float, default=0.5, help="its requests a second")
    parser.add_argument("--times", type=Path, default=_TIMES, help="a result of weights_mix.py")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    given.orders = given.orders.split(",")
    given.rates = sorted(float(rate) for rate in given.rates.split(","))
    given.seeds = [int(seed) for seed in given.seeds.split(",")]
    return given


def _run(
    given: argparse.Namespace, measured: dict[str, Any], order: str, rate: float
) -> dict[str, Any]:
    shapes = [_FIRST, given.beside] if given.beside else [_FIRST]
    models = simulated_models(pick(len(shapes), 1 << 60, 1, [(shape, 1) for shape in shapes]))
    weight_bytes, times = sum(one.spec.weight_bytes for one in models), read_times(measured)
    arena = Arena("cut", weight_bytes + round(given.kv_gb * 1e9))
    host = earlier_machine(measured["host"])
    slice_ = host.plan(arena, HOST_KV_BYTES if order == "rotation" else 0)
    machine = simulated_machine(host, slice_, arena, models, times and times.bounded())
    slo = Slo(NO_DEADLINE_S, NO_DEADLINE_S) if order == "first-come" else Slo(TTFT_S, TBT_S)
    names = [one.spec.id for one in sorted(models, key=lambda one: one.shape.name != _FIRST)]
    requests = [
        SimRequest(one.due_s, one.model, one.input_tokens, one.output_tokens)
        for one in _asked(given, names, rate)
    ]
    scenario = Scenario("", "", WorkloadSettings(""), seed=given.seed, as_live=True, patience=0.0)
    models = [replace(one, spec=replace(one.spec, slo=slo)) for one in models]
    simulation = prepare(scenario, models, requests, machine)
    simulation.run()
    ended = simulation.requests.ended
    moved = sum(one.use.moved_bytes for one in simulation.slices.values())
    row = _shares(ended) | {
        "moved_bytes": moved, "preempted": sum(one.preempted for one in ended),
        "seconds": max(one.last_s for one in ended),
    }  # fmt: skip
    if given.beside:
        row["models"] = {
            name: _shares([one for one in ended if one.request.model == name]) for name in names
        }
    return row


def _asked(given: argparse.Namespace, names: Sequence[str], rate: float) -> list[Shape]:
    """Return the requests of all models, in the order of their arrival."""
    rates = (rate, given.beside_rate)
    asked = [shapes_of(given, name, each) for name, each in zip(names, rates, strict=False)]
    return sorted(chain.from_iterable(asked), key=lambda one: one.due_s)


def _shares(ended: Sequence[TrackedRequest]) -> dict[str, Any]:
    found = figures([_record(*one) for one in enumerate(ended)], {})
    keys = ("requests", "ttft_in_time", "tbt_in_time", "both_in_time")
    return {key: found[key] for key in keys}


def _spread(found: Rows, rows: Rows) -> dict[str, Any]:
    """Return the least, mean and most of the bars over the seeds, and what rotation lost of KV."""
    spread: dict[str, Any] = {}
    for key in ("ttft_in_time", "tbt_in_time"):
        values = [bar["value"] for bar in found if bar["bar"].startswith(key)]
        if values:
            spread[key] = {"least": min(values), "mean": fmean(values), "most": max(values)}
    rotating = [row for row in rows if row["order"] == "rotation"]
    return spread | {
        "seeds": len({bar["seed"] for bar in found}),
        "preempted": sum(r["preempted"] for r in rotating),
    }


def _by_model(rows: Rows) -> Rows:
    """Return each model's share of first tokens in time over all seeds, by order and rate. `least`:
    the smaller share, to the mean of both."""
    found: Rows = []
    for order, rate in dict.fromkeys((row["order"], row["rate"]) for row in rows):
        own = [row["models"] for row in rows if (row["order"], row["rate"]) == (order, rate)]
        shares: dict[str, float] = {}
        for name in own[0]:
            asked = sum(one[name]["requests"] for one in own)
            in_time = sum(one[name]["requests"] * one[name]["ttft_in_time"] for one in own)
            shares[name] = in_time / max(1, asked)
        least = min(shares.values()) / max(1e-9, fmean(shares.values()))
        found.append({"order": order, "rate": rate, "shares": shares, "least": least})
    return found


def _record(index: int, one: TrackedRequest) -> Record:
    gaps = [one.tpot_s] * (one.sampled - 1)
    return Record(
        index, one.request.model, one.request.arrival_s, first_s=one.first_s, last_s=one.last_s,
        output_tokens=one.sampled, gaps_s=gaps,
        error="" if one.ending == "finished" else one.ending,
    )  # fmt: skip


if __name__ == "__main__":
    main()
