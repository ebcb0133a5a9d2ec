"""Trials of a plan: a machine and a catalogue, simulated with several seeds side by side."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from math import sqrt
from statistics import mean, stdev

from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.sim.planning.bottleneck import RESOURCES
from c2cserve.sim.report import Report, in_time, on_pace, report
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.growing import GrowingLoad
from c2cserve.sim.world.hardware import SimMachine, SimulatedSlice, build
from c2cserve.sim.world.shapes import SimModel

MORE = 1.5
"""How many times of a resource a trial has that asks whether it binds."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a two-sided interval of 95 %, by degrees of freedom from 1."""
_T_MANY = 1.96

Ran = Callable[[str], None]
"""Is told what has been simulated, once a seed of it is done."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What to simulate. `scenario` has the seed."""

    scenario: Scenario
    models: tuple[SimModel, ...]
    hardware: str
    more: str = ""
    """The resource of which there is more (`bottleneck.RESOURCES`); "": none."""
    lost: int = 0
    """GPUs that are missing."""


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of the time, mean over slices, unless stated otherwise."""

    busy: float
    compute: float
    bandwidth: float
    waiting: float
    """These three: steps ran whose duration was set by arithmetic, memory or the link."""
    link: float
    """Share of its bandwidth that the busiest link carried: streams, loads, and KV that moves."""
    kv: float
    """Share of the KV memory that was held while steps ran."""
    pool: float
    """Size of the whole catalogue as a share of the pool."""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One seed of a trial."""

    requests: int
    attainment: float
    ttft_p95_s: float
    tpot_p95_s: float
    use: Utilization
    asked: dict[str, int]
    """Requests of each model."""
    met: dict[str, int]


@dataclass(frozen=True, slots=True)
class Miss:
    """A model of whose requests fewer than were asked for are in time, over all seeds."""

    model: str
    requests: int
    attainment: float


@dataclass(frozen=True, slots=True)
class Trial:
    hardware: str
    models: int
    seeds: int
    requests: int
    """Mean over seeds, as all that follows."""
    attainment: float
    """Share of requests that finished with both targets met."""
    plus_minus: float
    """Half of the 95 % interval of the mean, by Student's t. It is 0 with one seed, which says
    nothing of it."""
    ttft_p95_s: float
    tpot_p95_s: float
    use: Utilization
    misses: tuple[Miss, ...]
    """Those with most requests that are not in time come first."""
    passed: bool


class Trials:
    """Runs trials of one scenario on an executor."""

    def __init__(
        self, base: Scenario, attainment: float, seeds: int, executor: Executor | None, ran: Ran
    ) -> None:
        """`executor`: None runs one simulation after the other in this process."""
        self._base, self._attainment = base, attainment
        self._seeds, self._executor, self._ran = seeds, executor, ran

    def of(self, base: Scenario) -> "Trials":
        """Return the same for another scenario."""
        return Trials(base, self._attainment, self._seeds, self._executor, self._ran)

    def run(
        self, hardware: str, models: Sequence[SimModel], *, seeds: int | None = None,
        more: str = "", lost: int = 0,
    ) -> Trial:  # fmt: skip
        """Simulate with the first `seeds` seeds; None: all. Raises ValueError (and its kinds)."""
        first = self._base.seed
        jobs = [
            Simulated(_seeded(self._base, first + number), tuple(models), hardware, more, lost)
            for number in range(self._seeds if seeds is None else seeds)
        ]
        what = f"{hardware}, {len(models)} models" + (f", more {more}" if more else "")
        runs: list[SeedResult] = []
        for done in self._map(jobs):
            runs.append(done)
            self._ran(what)
        return self._trial(hardware, len(models), runs)

    def _map(self, jobs: Sequence[Simulated]) -> Iterator[SeedResult]:
        return map(simulate, jobs) if self._executor is None else self._executor.map(simulate, jobs)

    def _trial(self, hardware: str, models: int, runs: Sequence[SeedResult]) -> Trial:
        shares = [one.attainment for one in runs]
        attainment = mean(shares)
        asked, met = Counter[str](), Counter[str]()
        for one in runs:
            asked.update(one.asked)
            met.update(one.met)
        misses = [
            Miss(name, count, met[name] / count) for name, count in asked.items()
            if met[name] < self._attainment * count
        ]  # fmt: skip
        misses.sort(key=lambda miss: (met[miss.model] - asked[miss.model], miss.model))
        use = {
            field: mean(getattr(one.use, field) for one in runs)
            for field in Utilization.__dataclass_fields__
        }
        return Trial(
            hardware=hardware, models=models, seeds=len(runs),
            requests=round(mean(one.requests for one in runs)),
            attainment=attainment, plus_minus=half_interval(shares),
            ttft_p95_s=mean(one.ttft_p95_s for one in runs),
            tpot_p95_s=mean(one.tpot_p95_s for one in runs),
            use=Utilization(**use), misses=tuple(misses), passed=attainment >= self._attainment,
        )  # fmt: skip


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean; 0 for one value."""
    freedom = len(values) - 1
    if freedom < 1:
        return 0.0
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else _T_MANY
    return t * stdev(values) / sqrt(len(values))


def _seeded(base: Scenario, seed: int) -> Scenario:
    return replace(base, seed=seed, workload=replace(base.workload, seed=seed))


_loads: dict[str, GrowingLoad] = {}
"""A process reads traces once for each seed."""


def load_of(scenario: Scenario) -> GrowingLoad:
    """Raises as `GrowingLoad`."""
    key = repr(scenario.workload)
    if key not in _loads:
        _loads[key] = GrowingLoad(scenario.workload)
    return _loads[key]


def simulate(job: Simulated) -> SeedResult:
    """Run one simulation; any process can. Raises ValueError (and its kinds)."""
    machine = build(job.hardware, job.scenario.slices, PRESETS[job.scenario.policy])
    if job.lost:
        machine = without_gpus(machine, job.lost)
    if job.more:
        machine = RESOURCES[job.more](machine, MORE)
    requests = load_of(job.scenario).of(job.models)
    simulation = prepare(job.scenario, job.models, requests, machine)
    simulation.run()
    result = report(simulation)
    asked, met = Counter[str](), Counter[str]()
    for one in simulation.requests.ended:
        asked[one.request.model] += 1
        met[one.request.model] += one.ending == "finished" and in_time(one) and on_pace(one)
    return SeedResult(
        result.requests, result.slo_attainment, result.ttft.p95, result.tpot.p95,
        _use(result, machine, job.models), dict(asked), dict(met),
    )  # fmt: skip


def gpus(machine: SimMachine) -> list[str]:
    """Return the names of the machine's GPUs."""
    return list(dict.fromkeys(one.node for one in machine.slices if one.h2d))


def without_gpus(machine: SimMachine, count: int) -> SimMachine:
    """Return the machine without the slices of its last GPUs, and without their links."""
    gone = set(gpus(machine)[-count:])
    lost = {f"{node}.h2d" for node in gone}

    def lonelier(one: SimulatedSlice) -> SimulatedSlice:
        relays = tuple(route for route in one.relays if route[0] not in lost)
        share = len(relays) / max(1, len(one.relays))
        slice_ = replace(one.slice, relayed_bytes_per_s=share * one.slice.relayed_bytes_per_s)
        return replace(one, relays=relays, slice=slice_)

    left = tuple(lonelier(one) for one in machine.slices if one.node not in gone)
    return replace(machine, slices=left)


def _use(result: Report, machine: SimMachine, models: Sequence[SimModel]) -> Utilization:
    nodes = list(result.nodes.values())
    speeds = dict(machine.links)

    def share(values: Iterator[float]) -> float:
        return sum(values) / len(nodes)

    return Utilization(
        busy=share(node.busy for node in nodes),
        compute=share(node.compute for node in nodes),
        bandwidth=share(node.memory for node in nodes),
        waiting=share(node.link for node in nodes),
        link=max(
            (link.mean_bytes_per_s / speeds[name] for name, link in result.links.items()
             if not name.endswith(".compute")), default=0.0,
        ),
        kv=share(node.kv for node in nodes),
        pool=sum(model.spec.weight_bytes for model in models) / machine.hardware.pool_bytes,
    )  # fmt: skip
