"""`rotation_live.py` in the simulator: the same requests, slice and orders, on any machine. JSON.

python benchmarks/rotation_simulated.py [--rates 4,5,6,8,10] [--kv-gb 2] [--seconds 14]
    [--seed 1] [--times FILE] [--out FILE]

Step times and speeds are those that `weights_mix.py` measured on an H200 (--times).
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
from c2cserve.core.request import Slo
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.requests import SimRequest, TrackedRequest

_TIMES = Path(__file__).parent / "results" / "weights_mix_h200_eleventh.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="4,5,6,8,10", help="requests a second")
    parser.add_argument("--kv-gb", type=float, default=2.0, help="beside the weights")
    parser.add_argument("--seconds", type=float, default=14.0, help="of arrivals, for each rate")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens, at most")
    parser.add_argument("--output", type=int, default=512, help="tokens, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=Path, default=_TIMES, help="a result of weights_mix.py")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    measured = json.loads(given.times.read_text())["results"]
    rows: list[dict[str, Any]] = []
    for order in ORDERS:
        for rate in map(float, given.rates.split(",")):
            rows.append({"order": order, "rate": rate} | _run(given, measured, order, rate))
            print(rows[-1], flush=True)
    results = {"rows": rows, "bars": bars(rows)}
    report(
        results, given.out, kv_gb=given.kv_gb, seconds=given.seconds, seed=given.seed,
        ttft_s=TTFT_S, tbt_s=TBT_S, prompt=given.prompt, output=given.output,
        times=given.times.name,
    )  # fmt: skip


def _run(
    given: argparse.Namespace, measured: dict[str, Any], order: str, rate: float
) -> dict[str, Any]:
    [model] = simulated_models(pick(1, 1 << 60, 1, (("llama-8b", 1),)))
    spec, times = model.spec, read_times(measured)
    arena = Arena("cut", spec.weight_bytes + round(given.kv_gb * 1e9))
    host = earlier_machine(measured["host"])
    slice_ = host.plan(arena, HOST_KV_BYTES if order == "rotation" else 0)
    machine = simulated_machine(host, slice_, arena, [model], times and times.bounded())
    slo = Slo(NO_DEADLINE_S, NO_DEADLINE_S) if order == "first-come" else Slo(TTFT_S, TBT_S)
    requests = [
        SimRequest(one.due_s, one.model, one.input_tokens, one.output_tokens)
        for one in shapes_of(given, spec.id, rate)
    ]
    scenario = Scenario("", "", WorkloadSettings(""), seed=given.seed, as_live=True, patience=0.0)
    models = [replace(model, spec=replace(spec, slo=slo))]
    simulation = prepare(scenario, models, requests, machine)
    simulation.run()
    ended = simulation.requests.ended
    found = figures([_record(*one) for one in enumerate(ended)], {})
    moved = sum(one.use.moved_bytes for one in simulation.slices.values())
    return {
        "requests": found["requests"], "ttft_in_time": found["ttft_in_time"],
        "tbt_in_time": found["tbt_in_time"], "both_in_time": found["both_in_time"],
        "moved_bytes": moved, "seconds": max(one.last_s for one in ended),
    }  # fmt: skip


def _record(index: int, one: TrackedRequest) -> Record:
    gaps = [one.tpot_s] * (one.sampled - 1)
    return Record(
        index, one.request.model, one.request.arrival_s, first_s=one.first_s, last_s=one.last_s,
        output_tokens=one.sampled, gaps_s=gaps,
        error="" if one.ending == "finished" else one.ending,
    )  # fmt: skip


if __name__ == "__main__":
    main()
