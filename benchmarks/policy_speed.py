"""CPU time the policies take per decision (events applied and decided), microseconds: JSON.

python benchmarks/policy_speed.py [--decisions N] [--seed N] [--repeats N] [--out FILE]

A closed loop in virtual time, so that only policy code is measured: 256 requests under way, one
new for each that ends, lengths and models drawn at random (Zipf over the models). Equal runs make
equal decisions, so each is made in several runs and its least time counts: what else the machine
does only adds to it.

  cluster          200 models in the pool, 8 slices of 8 active models, no request waits
  cluster_queue    the same with 600 requests more than the slices take: all of them wait
  cluster_large    1,000 models, 64 GPU slices with profiled times, memory and a link
  slice            one of those slices: 8 active models of 4 running requests each
  slice_256        8 active models of 32 running requests each
  slice_one_model  64 running requests of one model, and as many waiting
"""

import argparse
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random

from report import report

from c2cserve.core.actions import Dispatch, Reject, RunStep
from c2cserve.core.events import (
    Activated,
    Arrived,
    Finished,
    FirstToken,
    ModelAdded,
    ModelLoaded,
    ModelUsable,
    PoolState,
    Profiled,
    SeqOutcome,
    SliceUp,
    StepDone,
    StepTimes,
    Submitted,
)
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.policy import Policy
from c2cserve.core.request import BLOCK_TOKENS, Request
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.policy.slice.policy import SlicePolicy

RUNNING = 256

Timed = tuple[list[float], dict[str, int]]
"""Seconds of each decision, and what there was to decide about in the end."""


class Thinking:
    """Times every decision."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.took_s: list[float] = []

    def __call__(self, now: float, *events: object) -> list:
        start = time.thread_time()
        for event in events:
            self.policy.apply(event)
        actions = self.policy.decide(now)
        self.took_s.append(time.thread_time() - start)
        return list(actions)


def figures(took_s: Sequence[float]) -> dict[str, float]:
    """The first tenth warms up."""
    took = sorted(took_s[len(took_s) // 10 :])
    at = {"p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99, "p999_us": 0.999}
    found = {name: round(1e6 * took[int(share * len(took))], 1) for name, share in at.items()}
    return {"decisions": len(took), **found, "max_us": round(1e6 * took[-1], 1)}


def requests(random: Random, models: int) -> Iterator[tuple[str, str, int, int]]:
    """Id, model, prompt and output length; small ids are asked for most."""
    weights = [1 / (rank + 1) for rank in range(models)]
    for number in count():
        [model] = random.choices(range(models), weights)
        yield f"r{number}", f"m{model}", random.randint(10, 400), random.randint(8, 120)


def small_slices() -> list[Slice]:
    return [Slice(f"s{i}", "cpu", max_batch=32, max_active=8) for i in range(8)]


def large_slices() -> list[Slice]:
    return [
        Slice(
            f"s{i}", "gpu", kv_bytes=20 << 30, max_batch=32, max_active=8, hbm_bytes=40 << 30,
            gpu=GpuShare(f"g{i}", 132), link=f"l{i}", link_bytes_per_s=50e9,
        )
        for i in range(64)
    ]  # fmt: skip


def cluster(decisions: int, seed: int, queued: int, slices: list[Slice], models: int) -> Timed:
    random = Random(seed)
    policy = ClusterPolicy(AdmissionSettings(max_waiting=10_000, patience=0.0))
    think = Thinking(policy)
    think(0.0, PoolState(1 << 50), *(SliceUp(one) for one in slices))
    names = tuple(f"m{i}" for i in range(models))
    for name in names:
        spec = ModelSpec(name, 1 << 30, 16, 1 << 16, 4096)
        think(0.0, ModelAdded(spec), ModelUsable(spec.id), ModelLoaded(spec.id, 1, 1.0))
    if slices[0].kind == "gpu":
        where = tuple(one.id for one in slices)
        decode = tuple((n, b, 0.01 + 1e-4 * b) for n in (512, 2048) for b in (1, 4, 16, 64))
        think(0.0, Profiled(where, names, ((1, 0.01), (4096, 0.4)), decode))
    think.took_s.clear()
    heap: list[tuple[float, int, object]] = []
    order, made = count(), requests(random, models)
    for _ in range(len(slices) * 64 + queued if queued else RUNNING * len(slices) // 8):
        heapq.heappush(heap, (random.random(), next(order), None))
    while len(think.took_s) < decisions:
        now, _, event = heapq.heappop(heap)
        if event is None:  # a request comes
            name, model, prompt, new = next(made)
            event = Arrived(Request(name, model, prompt, new, now))
        elif isinstance(event, Finished):
            heapq.heappush(heap, (now + random.random() * 0.01, next(order), None))
        for action in think(now, event):
            assert not isinstance(action, Reject)
            if isinstance(action, Dispatch):
                took = random.uniform(0.2, 2.0)
                for at, news in (
                    (0.1, FirstToken(action.request_id, 0.1)),
                    (0.2, StepTimes(action.slice_id, f"m{random.randrange(8)}", 0.01, 1e-4)),
                    (1.0, Finished(action.request_id, 9)),
                ):
                    heapq.heappush(heap, (now + at * took, next(order), news))
    running = sum(load.requests for load in policy._slices.values())
    return think.took_s, {"running": running, "waiting": len(policy._queue)}


def one_slice(decisions: int, seed: int, models: int, each: int, batch: int) -> Timed:
    random = Random(seed)
    slice_ = Slice("s", "cpu", kv_bytes=4 << 30, max_batch=batch)
    policy = SlicePolicy(slice_)
    think = Thinking(policy)
    think(0.0, *(Activated(ModelSpec(f"m{i}", 1 << 30, 16, 1 << 16, 4096)) for i in range(models)))
    lengths = {}
    order = count()

    def fresh(model: int, now: float) -> Submitted:
        name = f"r{next(order)}"
        prompt, new = random.randint(10, 400), random.randint(8, 120)
        hashes = tuple(random.getrandbits(64) for _ in range(prompt // BLOCK_TOKENS))
        lengths[name] = new
        return Submitted(Request(name, f"m{model}", prompt, new, now, prefix_hashes=hashes))

    now = 0.0
    actions = think(now, *(fresh(model, now) for model in range(models) for _ in range(each)))
    while len(think.took_s) < decisions:
        [step] = [action.step for action in actions if isinstance(action, RunStep)]
        outcomes, events = [], []
        for part in step.seqs:
            if part.emits:
                lengths[part.request_id] -= 1
                finished = lengths[part.request_id] == 0
                outcomes.append(SeqOutcome(part.request_id, 1, finished))
                if finished:
                    events.append(fresh(int(step.model[1:]), now))
        took = 0.01 + 2e-4 * step.tokens
        now += took
        actions = think(now, StepDone(step.id, tuple(outcomes), took), *events)
    return think.took_s, {"running": policy.running, "waiting": policy.waiting}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    n, seed = options.decisions, options.seed
    cases: dict[str, Callable[[], Timed]] = {
        "cluster": lambda: cluster(n, seed, 0, small_slices(), 200),
        "cluster_queue": lambda: cluster(n, seed, 600, small_slices(), 200),
        "cluster_large": lambda: cluster(n, seed, 0, large_slices(), 1000),
        "slice": lambda: one_slice(n, seed, models=8, each=4, batch=32),
        "slice_256": lambda: one_slice(n, seed, models=8, each=32, batch=32),
        "slice_one_model": lambda: one_slice(n, seed, models=1, each=128, batch=64),
    }
    results: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        runs = [case() for _ in range(options.repeats)]
        least = [min(times) for times in zip(*(took for took, _ in runs), strict=True)]
        results[name] = {**figures(least), **runs[0][1]}
    report(results, options.out, decisions=n, seed=seed, repeats=options.repeats)


if __name__ == "__main__":
    main()
