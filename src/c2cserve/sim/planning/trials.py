"""Trials of a plan: a machine and a catalogue, simulated with several seeds side by side."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from time import perf_counter

from c2cserve.sim.planning.bottleneck import RESOURCES
from c2cserve.sim.report import Report, in_time, on_pace, report
from c2cserve.sim.run import Scenario, prepare, preset_of
from c2cserve.sim.workload.growing import GrowingLoad
from c2cserve.sim.world.hardware import SimMachine, SimulatedSlice, build
from c2cserve.sim.world.requests import SimRequest, TrackedRequest
from c2cserve.sim.world.shapes import SimModel

MORE = 1.5
"""How many times of a resource a trial has that asks whether it binds."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a two-sided interval of 95 %, by degrees of freedom from 1."""
_T_MANY = 1.96

Enough = Callable[[int, float], bool]
"""Receives a seed's number and share in time, and returns whether a trial needs no other seed."""
Ran = Callable[[str, "Simulated", "SeedResult"], None]
"""Is told what has been simulated once a seed of it is done, and what that came to."""


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
    enough: float = 0.0
    """No more requests come once it is certain that a smaller share of all will be in time."""


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
    cut: bool
    """It ended early (`Simulated.enough`)."""
    took_s: float


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
    shares: tuple[float, ...] = ()
    """Share in time of each seed."""
    cut: bool = False
    """It ended early, because it could not pass any more. All figures are of what was simulated."""


TrialKey = tuple[str, bool, int, int, str, int, float]
"""What tells one simulation of a plan from another: a catalogue by how many models it has."""


class Trials:
    """Runs trials of one scenario on an executor."""

    def __init__(
        self, base: Scenario, attainment: float, seeds: int, executor: Executor, ran: Ran,
        width: int = 1,
    ) -> None:  # fmt: skip
        """`width`: how many simulations run on `executor` at a time."""
        self._base, self._attainment = base, attainment
        self._seeds, self._executor, self._ran = seeds, executor, ran
        self._width = width
        self._begun: dict[TrialKey, Future[SeedResult]] = {}
        """All simulations so far: none runs twice."""
        self._seeded: dict[int, Scenario] = {}
        self._asked_for: set[TrialKey] = set()
        """Those whose results a trial or an experiment has."""

    def of(self, base: Scenario) -> "Trials":
        """Return the same for another scenario."""
        return Trials(base, self._attainment, self._seeds, self._executor, self._ran, self._width)

    def begin(
        self, hardware: str, models: Sequence[SimModel], *, seeds: int | None = None,
        cut: bool = False,
    ) -> None:  # fmt: skip
        """Begin simulations that `run` will be asked for next. It does nothing where only one runs
        at a time."""
        self._begin_soon(self._jobs(hardware, models, seeds, 0, cut))

    def begin_with_more(
        self, hardware: str, models: Sequence[SimModel], resources: Sequence[str]
    ) -> None:
        """Begin the simulations that `with_more` will be asked for, with the first seed."""
        self._begin_soon(self._with_more(hardware, models, resources, 0))

    def _begin_soon(self, jobs: Sequence[Simulated]) -> None:
        if self._width > 1:
            for job in jobs:
                self._begin(job)

    def run(
        self, hardware: str, models: Sequence[SimModel], *, seeds: int | None = None,
        lost: int = 0, cut: bool = False, enough: Enough | None = None,
    ) -> Trial:  # fmt: skip
        """Simulate with the first `seeds` seeds; None: all.

        `cut`: end a simulation of one seed once it cannot pass any more. `enough` gets each seed's
        share, and says whether the trial needs no other seed. Raises ValueError (and its kinds)."""
        jobs = self._jobs(hardware, models, seeds, lost, cut)
        what = f"{hardware}, {plural(len(models), 'model')}"
        runs: list[SeedResult] = []
        for number, run in enumerate(self._run(jobs, what, every=enough is None)):
            runs.append(run)
            if enough is not None and enough(number, run.attainment):
                break
        return self._trial(hardware, len(models), runs)

    def with_more(
        self, hardware: str, models: Sequence[SimModel], resources: Sequence[str], seed: int
    ) -> list[float]:
        """Return the share in time with more of each resource, with one of the seeds. All
        simulations run side by side. Raises ValueError (and its kinds)."""
        jobs = self._with_more(hardware, models, resources, seed)
        what = f"{hardware}, {plural(len(models), 'model')}, more of a resource"
        runs = self._run(jobs, what, every=True)
        return [one.attainment for one in runs]

    def _with_more(
        self, hardware: str, models: Sequence[SimModel], resources: Sequence[str], seed: int
    ) -> list[Simulated]:
        base = Simulated(self._base, tuple(models), hardware)
        return [self._job(replace(base, more=more), seed) for more in resources]

    def _jobs(
        self, hardware: str, models: Sequence[SimModel], seeds: int | None, lost: int, cut: bool
    ) -> list[Simulated]:
        seeds = self._seeds if seeds is None else seeds
        enough = self._attainment if cut and seeds == 1 else 0.0
        one = Simulated(self._base, tuple(models), hardware, "", lost, enough)
        return [self._job(one, number) for number in range(seeds)]

    def _job(self, job: Simulated, number: int) -> Simulated:
        if number not in self._seeded:
            self._seeded[number] = _seeded(self._base, self._base.seed + number)
        return replace(job, scenario=self._seeded[number])

    def _run(self, jobs: Sequence[Simulated], what: str, *, every: bool) -> Iterator[SeedResult]:
        """Yield the results in order. `every`: all of them are needed. Else no more are under way
        than run at a time."""
        width = len(jobs) if every and self._width > 1 else self._width
        for number, job in enumerate(jobs):
            begun = [self._begin(one) for one in jobs[number : number + width]]
            done, key = begun[0].result(), key_of(job)
            if not done.cut:
                key = _whole(key)
                self._begun[key] = begun[0]
            if key not in self._asked_for:
                self._asked_for.add(key)
                self._ran(what, job, done)
            yield done

    def _begin(self, job: Simulated) -> "Future[SeedResult]":
        """Return a simulation, which is begun if none of the same was."""
        key = key_of(job)
        begun = self._begun.get(_whole(key)) or self._begun.get(key)
        if begun is None:
            begun = self._begun[key] = self._executor.submit(simulate, job)
        return begun

    def _trial(self, hardware: str, models: int, runs: Sequence[SeedResult]) -> Trial:
        shares = [one.attainment for one in runs]
        attainment = fmean(shares)
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
            field: fmean(getattr(one.use, field) for one in runs)
            for field in Utilization.__dataclass_fields__
        }
        return Trial(
            hardware=hardware, models=models, seeds=len(runs),
            requests=round(fmean(one.requests for one in runs)),
            attainment=attainment, plus_minus=half_interval(shares),
            ttft_p95_s=fmean(one.ttft_p95_s for one in runs),
            tpot_p95_s=fmean(one.tpot_p95_s for one in runs),
            use=Utilization(**use), misses=tuple(misses),
            passed=attainment >= self._attainment,
            shares=tuple(shares), cut=any(one.cut for one in runs),
        )  # fmt: skip


def key_of(job: Simulated) -> TrialKey:
    scenario, count = job.scenario, len(job.models)
    relays = scenario.slices.relays
    return job.hardware, relays, count, scenario.seed, job.more, job.lost, job.enough


def _whole(key: TrialKey) -> TrialKey:
    """Return the key of the same that is not cut short."""
    return (*key[:-1], 0.0)


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
    machine = build(job.hardware, job.scenario.slices, preset_of(job.scenario))
    if job.lost:
        machine = without_gpus(machine, job.lost)
    if job.more:
        machine = RESOURCES[job.more](machine, MORE)
    requests = load_of(job.scenario).of(job.models)
    began_s = perf_counter()
    most_missed = int(len(requests) * (1.0 - job.enough))
    ended: list[TrackedRequest] = []
    coming = requests if not job.enough else _while_few_miss(requests, ended, most_missed)
    simulation = prepare(job.scenario, job.models, coming, machine)
    simulation.requests.ended = ended
    simulation.run()
    result = report(simulation)
    asked, met = Counter[str](), Counter[str]()
    for one in ended:
        asked[one.request.model] += 1
        met[one.request.model] += _met(one)
    return SeedResult(
        result.requests, result.slo_attainment if ended else 1.0, result.ttft.p95, result.tpot.p95,
        _use(result, machine, job.models), dict(asked), dict(met),
        len(ended) < len(requests), perf_counter() - began_s,
    )  # fmt: skip


def _met(one: TrackedRequest) -> bool:
    return one.ending == "finished" and in_time(one) and on_pace(one)


def _while_few_miss(
    requests: Sequence[SimRequest], ended: Sequence[TrackedRequest], most: int
) -> Iterator[SimRequest]:
    """Yield requests until more than `most` of those that have `ended` were not in time."""
    seen = missed = 0
    for request in requests:
        while seen < len(ended):
            missed += not _met(ended[seen])
            seen += 1
        if missed > most:
            return
        yield request


def plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


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
