"""The loads and the table of `policy_ratios.py`."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

from report import report

from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.studies.slinfer import HARDWARE, met, target
from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.world.hardware import SimMachine, SliceSettings, build
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation

SYSTEMS = ("serverlessllm", "slinfer", "c2cserve")
RIVALS = SYSTEMS[:-1]
_QUICK_S = 300.0
_MIX = "llama-3.2-3b*48,llama-3.1-8b*12,qwen2.5-14b*4"


@dataclass(frozen=True, slots=True)
class Load:
    hardware: str
    catalog: str
    workload: WorkloadSettings
    folder: bool = False
    """The trace is a file in the folder that `--traces` names."""


def _functions(models: int, **more: Any) -> WorkloadSettings:
    return WorkloadSettings(f"slinfer{models}", mapping="shuffle", **more)


def _burst(per_s: int) -> WorkloadSettings:
    name = "burstgpt_slinfer64_10min.csv.gz"
    return WorkloadSettings(name, mapping="shuffle", where={"load_rps": str(per_s)})


LOADS: Mapping[str, Load] = {
    "functions, 128 of 3B, testbed": Load(HARDWARE, "llama-3.2-3b*128", _functions(128)),
    "functions, 128 of 7B, testbed": Load(HARDWARE, "llama-2-7b*128", _functions(128)),
    "functions, 128 of 13B, testbed": Load(HARDWARE, "llama-2-13b*128", _functions(128)),
    "BurstGPT 2/s, 64 of 7B, testbed": Load(HARDWARE, "llama-2-7b*64", _burst(2), folder=True),
    "BurstGPT 4/s, 64 of 7B, testbed": Load(HARDWARE, "llama-2-7b*64", _burst(4), folder=True),
    "functions, 64 mixed, one H200": Load("h200-x1", _MIX, _functions(64, duration_s=900.0)),
    "functions, 128 of 8B, one H200": Load(
        "h200-x1", "llama-3.1-8b*128", _functions(128, duration_s=600.0)
    ),
    "Azure chat, 64 of 3B and 8B, one H200": Load(
        "h200-x1", "llama-3.2-3b*32,llama-3.1-8b*32",
        WorkloadSettings("azure-conv", duration_s=600.0),
    ),
    "ServeGen, 43 of 8B, two H200s": Load(
        "h200-x2", "llama-3.1-8b*43",
        WorkloadSettings("servegen", rate_scale=0.01, duration_s=600.0, lengths="servegen",
                         mapping="shuffle"),
    ),
    "Mooncake, 16 of 8B, two H200s": Load(
        "h200-x2", "llama-3.1-8b*16", WorkloadSettings("mooncake", duration_s=600.0)
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    load: str
    system: str
    seed: int
    settings: Load = field(repr=False)


def machine_of(load: Load, system: str) -> SimMachine:
    # Weights and KV share all memory, as on a server.
    slices = SliceSettings(max_batch=256, max_step_tokens=4096, max_active=32, kv_share=1.0)
    return build(load.hardware, slices, PRESETS[system])


def simulation_of(load: Load, system: str, seed: int, machine: SimMachine) -> Simulation:
    models = interleaved(catalogue(load.catalog))
    requests = workload(replace(load.workload, seed=seed), models)
    admission = AdmissionSettings(max_waiting=1_000_000, patience=1.0, foresee=False)
    settings = Settings(preset=PRESETS[system], admission=admission, seed=seed, noise=0.05)
    return Simulation(machine, models, requests, target, settings)


def run(cell: Cell) -> dict[str, Any]:
    """Simulate a cell, and return what it comes to."""
    began_s = perf_counter()
    load = cell.settings
    simulation = simulation_of(load, cell.system, cell.seed, machine_of(load, cell.system))
    simulation.run()
    ended = simulation.requests.ended
    streamed = sum(one.use.streamed_bytes for one in simulation.slices.values())
    return {
        "load": cell.load, "system": cell.system, "seed": cell.seed, "requests": len(ended),
        "in_time": sum(map(met, ended)), "streamed_bytes": streamed,
        "took_s": perf_counter() - began_s,
    }  # fmt: skip


def summary(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each load: shares in time, and ratios of one seed each, over the seeds."""
    rows: list[dict[str, Any]] = []
    for load in dict.fromkeys(cell["load"] for cell in cells):
        here = [cell for cell in cells if cell["load"] == load]
        by = {(cell["system"], cell["seed"]): cell for cell in here}
        seeds = sorted({cell["seed"] for cell in here})
        row: dict[str, Any] = {"load": load, "seeds": len(seeds)}
        row["requests"] = round(mean(cell["requests"] for cell in here))
        for system in SYSTEMS:
            shares = [by[system, s]["in_time"] / by[system, s]["requests"] for s in seeds]
            row[system] = _spread(shares)
        for rival in RIVALS:
            served = [max(1, by[rival, s]["in_time"]) for s in seeds]
            ours = [by["c2cserve", s]["in_time"] for s in seeds]
            all_ = [by["c2cserve", s]["requests"] for s in seeds]
            row[f"ratio_{rival}"] = _spread([a / b for a, b in zip(ours, served, strict=True)])
            row[f"most_{rival}"] = mean(a / b for a, b in zip(all_, served, strict=True))
        rows.append(row)
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": mean(values), "least": min(values), "most": max(values)}


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    print("| load | requests | serverlessllm | slinfer | c2cserve | over serverlessllm | "
          "over slinfer | the most possible |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        shares = " | ".join(f"{row[system]['mean']:.1%}" for system in SYSTEMS)
        ratios = " | ".join(_ratio(row[f"ratio_{rival}"]) for rival in RIVALS)
        most = f"{row['most_slinfer']:.2f} x"
        print(f"| {row['load']} | {row['requests']:,} | {shares} | {ratios} | {most} |")


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['mean']:.2f} x ({spread['least']:.2f} to {spread['most']:.2f})"


def _cells(only: str, seeds: int, traces: Path | None, *, quick: bool) -> Iterator[Cell]:
    for name, load in LOADS.items():
        if only not in name or (load.folder and traces is None):
            continue
        settings = load.workload
        if load.folder and traces is not None:
            settings = replace(settings, trace=str(traces / settings.trace))
        if quick:
            settings = replace(settings, duration_s=min(settings.duration_s, _QUICK_S))
        for seed in range(seeds):
            for system in SYSTEMS:
                yield Cell(name, system, seed, replace(load, workload=settings))


def compare(options: argparse.Namespace, policies: str) -> None:
    """Do what the command line asks for. `policies`: whether they are compiled."""
    if options.table is not None:
        _show(json.loads(options.table.read_text())["results"]["rows"])
        return
    cells = list(_cells(options.only, options.seeds, options.traces, quick=options.quick))
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for done in pool.map(run, cells):
            found.append(done)
            share = done["in_time"] / max(1, done["requests"])
            print(f"{len(found)} of {len(cells)}: {done['load']}, {done['system']}, seed "
                  f"{done['seed']}: {share:.1%} in {done['took_s']:.0f} s", flush=True)  # fmt: skip
    rows = summary(found)
    _show(rows)
    report({"rows": rows, "cells": found}, options.out, show=False,
           seeds=options.seeds, quick=options.quick, policies=policies)  # fmt: skip
