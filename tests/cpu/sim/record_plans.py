"""Records the simulations of plans, with their CPU seconds, one after the other.

python record_plans.py NAME...        adds to recorded_plans.json beside this file
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from time import monotonic, process_time
from typing import Any

from c2cserve.sim import compiled

FILE = Path(__file__).parent / "recorded_plans.json"

PLANS: dict[str, dict[str, Any]] = {
    "3B": {"hardware": "h200-x1", "catalog": "llama-3.2-3b*64"},
    "3B, 99 %": {"hardware": "h200-x1", "catalog": "llama-3.2-3b*16", "asked": 0.99},
    "8B on GH200": {"hardware": "gh200", "catalog": "llama-3.1-8b*8"},
    "8B on H200": {"hardware": "h200-x1", "catalog": "llama-3.1-8b*32"},
    "3B and 8B on two H200": {
        "hardware": "h200-x2", "catalog": "llama-3.2-3b*8,llama-3.1-8b*4", "spare": True,
        "layouts": True,
    },
    "7B on A100s and CPUs": {
        "hardware": "a100x4+xeon6462cx4", "catalog": "llama-2-7b*16", "slo": "slinfer",
        "spare": True,
    },
    "8B on Rubin": {"hardware": "rubin", "catalog": "llama-3.1-8b*64", "layouts": True},
    "13B, slinfer64": {
        "hardware": "gh200-144", "catalog": "llama-2-13b*8", "trace": "slinfer64",
        "layouts": True,
    },
    "partitions": {"hardware": "gh200:mig3", "catalog": "llama-3.2-3b,llama-3.1-8b*2"},
    "one load": {
        "hardware": "h200-x1", "catalog": "llama-3.2-3b*16", "trace": "azure-conv", "slo": "1,0.1",
    },
    "synthetic": {
        "hardware": "h200-x2", "catalog": "llama-3.1-8b*16", "slo": "1,0.1", "spare": True,
        "trace": "synthetic:rate=20,duration=300,sources=64,zipf=0.5",
    },
    "three seeds": {"hardware": "h200-x2", "catalog": "llama-3.1-8b*8", "seeds": 3},
    "one seed": {"hardware": "h200-x2", "catalog": "llama-3.2-3b*32", "seeds": 1, "spare": True},
    "servegen": {
        "hardware": "h200-x1", "catalog": "llama-3.2-3b*4", "trace": "servegen", "slo": "1,0.1",
        "duration_s": 120,
    },
    "machines": {
        "hardware": "h200-x1,h200-x2,h200-x4", "catalog": "llama-3.1-8b*80", "layouts": True,
        "spare": True,
    },
    "machines, 99 %": {
        "hardware": "gh200,gh200-144,gb200", "catalog": "llama-3.2-3b*70", "asked": 0.99,
    },
    "ten seeds": {"hardware": "gh200-144", "catalog": "llama-3.2-3b*16", "seeds": 10},
    "all fit": {"hardware": "h200-x2", "catalog": "llama-3.2-3b*16", "most": 64, "layouts": True},
}  # fmt: skip
HELD_OUT: dict[str, dict[str, Any]] = {
    "3B on GB200": {"hardware": "gb200", "catalog": "llama-3.2-3b*24", "layouts": True},
    "13B on two H200": {
        "hardware": "h200-x2", "catalog": "llama-2-13b*8", "slo": "slinfer", "spare": True,
    },
    "8B, 97 %, slinfer64": {
        "hardware": "gh200-144", "catalog": "llama-3.1-8b*4", "trace": "slinfer64", "asked": 0.97,
    },
    "machines, 13B": {
        "hardware": "gh200,gh200-144,h200-x2", "catalog": "llama-2-13b*40", "spare": True,
        "layouts": True,
    },
    "mooncake": {
        "hardware": "h200-x4", "catalog": "llama-3.1-8b*8", "trace": "mooncake", "slo": "2,0.1",
        "duration_s": 200,
    },
    "seven seeds, synthetic": {
        "hardware": "gh200", "catalog": "llama-3.2-3b*8", "seeds": 7, "slo": "1,0.1",
        "trace": "synthetic:rate=8,duration=400,sources=128,zipf=1",
    },
}  # fmt: skip
"""Plans by which no constant of the guesses was chosen."""


def key_of(job: Any) -> list[Any]:
    """Return what tells a simulation of a plan from its others."""
    relays = " relays" * job.scenario.slices.relays
    return [
        job.hardware + relays, len(job.models), job.scenario.seed, job.more, job.lost,
        int(bool(job.enough)),
    ]  # fmt: skip


class Recorder(Executor):
    """Runs simulations at once, and notes them. It runs none twice."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._done: dict[tuple[Any, ...], Any] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        key = tuple(key_of(args[0]))
        if key not in self._done:
            began_s = process_time()
            done = self._done[key] = fn(*args)
            took_s = round(process_time() - began_s, 3)
            share, busy = round(done.attainment, 5), round(done.use.busy, 4)
            self.rows.append([*key, share, int(done.cut), busy, took_s])
        future = Future[Any]()
        future.set_result(self._done[key])
        return future


def planner_of(
    recorded: dict[str, Any], executor: Executor, width: int,
    progress: Callable[[str, int, Any], None], clock: Callable[[], float] = monotonic,
) -> Any:  # fmt: skip
    """Return the planner of a recorded plan."""
    from c2cserve.sim.planning.plan import Planner
    from c2cserve.sim.planning.result import Wishes
    from c2cserve.sim.run import Scenario
    from c2cserve.sim.workload.build import WorkloadSettings
    from c2cserve.sim.world.shapes import catalogue, interleaved

    load = WorkloadSettings(
        recorded.get("trace", "slinfer128"), mapping="shuffle",
        duration_s=recorded.get("duration_s", 600),
    )  # fmt: skip
    base = Scenario(recorded["hardware"], recorded["catalog"], load, recorded.get("slo", "catalog"))
    wishes = Wishes(
        recorded.get("seeds", 5), recorded.get("layouts", False), recorded.get("spare", False)
    )
    models = interleaved(catalogue(recorded["catalog"]))
    asked = recorded.get("asked", 0.95)
    return Planner(base, models, asked, progress, wishes, executor, width, clock)


def ignore(what: str, done: int, left: object) -> None:
    """A plan that is recorded shows no progress."""


def search(recorded: dict[str, Any], planner: Any) -> Any:
    machines = recorded["hardware"].split(",")
    if len(machines) > 1:
        return planner.smallest_machine(machines)
    return planner.largest_catalogue(machines[0], recorded.get("most", 1024))


def record(name: str) -> None:
    asked = (PLANS | HELD_OUT)[name]
    recorder = Recorder()
    answer: list[Any] = []
    for width in (1, 2):
        found = search(asked, planner_of(asked, recorder, width, ignore))
        answer = [one and one.models for one in (found.best, found.beyond)] + [found.binds]
    plans = json.loads(FILE.read_text())
    plans[name] = asked | {"answer": answer, "rows": recorder.rows}
    lines = (f'"{name}": {json.dumps(plan)}' for name, plan in plans.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    total_s = sum(row[-1] for row in recorder.rows)
    what = f"{name}: {len(recorder.rows)} simulations, {total_s:.1f} s, {answer}\n"
    sys.stdout.write(what)
    sys.stdout.flush()


if __name__ == "__main__":
    compiled.use()
    sys.stdout.write(f"{compiled.status()}\n")
    for one in sys.argv[1:] or [*PLANS, *HELD_OUT]:
        record(one)
