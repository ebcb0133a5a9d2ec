"""Finds how many models a machine serves within targets, or which machine serves a catalogue.

A *trial* is one simulation. It passes if the share of requests that met both targets is at least
what was asked for. The search for the largest catalogue doubles (or halves) until one trial passes
and one fails, then bisects between them.

The bottleneck is found by experiment, in the failed trial that came closest. One resource after the
other is raised by half, and the resource that helps most is the bottleneck.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from c2cserve.policy.simulated.presets import PRESETS
from c2cserve.sim.planning.bottleneck import RESOURCES, could_bind
from c2cserve.sim.report import Report, report
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.growing import GrowingLoad
from c2cserve.sim.world.hardware import SimMachine, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import SimModel

_MORE = 1.5
_HELPS = 0.002
"""Share of all requests. A resource that helps fewer is not the bottleneck."""
_CLOSE = 0.02
"""The search ends when the smallest failing catalogue is larger by at most this share."""

Progress = Callable[[str, float], None]
"""Receives what is being simulated, and the share of its requests that have arrived."""


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of the time, mean over slices, unless stated otherwise."""

    busy: float
    compute: float
    bandwidth: float
    link: float
    """These three: steps ran whose duration was set by arithmetic, memory or the link."""
    busiest_link: float
    """Share of its bandwidth that the busiest link carried."""
    kv: float
    """Share of the KV memory that was held while steps ran."""
    pool: float
    """Size of the whole catalogue as a share of the pool."""


@dataclass(frozen=True, slots=True)
class Trial:
    hardware: str
    models: int
    requests: int
    attainment: float
    """Share of requests that finished with both targets met."""
    ttft_p95_s: float
    tpot_p95_s: float
    use: Utilization
    passed: bool


@dataclass(frozen=True, slots=True)
class Bottleneck:
    what: str
    attainment: float
    """Attainment with half as much again of the resource."""


@dataclass(frozen=True, slots=True)
class Plan:
    trials: tuple[Trial, ...]
    """All trials in the order they were made."""
    best: Trial | None
    """The largest catalogue that passed, or the first machine that did; None: nothing passed."""
    beyond: Trial | None
    """The trial that failed by least beyond it; None: nothing failed."""
    bottlenecks: tuple[Bottleneck, ...]
    """Experiments on `beyond`, one for each resource."""
    grows: bool
    """Whether more models meant more requests."""

    @property
    def binds(self) -> str:
        """The bottleneck (`sim.planning.bottleneck`), or "" if no single resource helps."""
        if self.beyond is None or not self.bottlenecks:
            return ""
        most = max(self.bottlenecks, key=lambda bottleneck: bottleneck.attainment)
        return most.what if most.attainment > self.beyond.attainment + _HELPS else ""

    def as_json(self) -> dict[str, Any]:
        """Return the plan for `--json`, where the key of `bottlenecks` is "reliefs"."""
        fields = asdict(self)
        named = {"reliefs" if key == "bottlenecks" else key: fields[key] for key in fields}
        return {**named, "binds": self.binds}


class Planner:
    """Runs the trials of one search.

    `base` is all but hardware and catalogue. `models` is the catalogue; larger ones repeat it."""

    def __init__(
        self, base: Scenario, models: Sequence[SimModel], attainment: float, progress: Progress
    ) -> None:
        """Raises OSError, ValueError (and its kinds)."""
        self._base, self._models, self._attainment = base, models, attainment
        self._progress = progress
        self._load = GrowingLoad(base.workload)
        self._trials: list[Trial] = []

    def smallest_machine(self, machines: Sequence[str]) -> Plan:
        """Try `machines`, given from small to large, until one passes.

        Raises ValueError (and its kinds)."""
        best: Trial | None = None
        beyond: Trial | None = None
        for hardware in machines:
            trial = self._try(hardware, len(self._models))
            if trial.passed:
                best = trial
                break
            beyond = trial
        return self._plan(best, beyond)

    def largest_catalogue(self, hardware: str, most: int) -> Plan:
        """Search up to `most` models. Raises ValueError (and its kinds)."""
        best: Trial | None = None
        beyond: Trial | None = None
        count = min(len(self._models), most)
        while True:
            trial = self._try(hardware, count)
            if trial.passed:
                best = trial
            else:
                beyond = trial
            if count == (1 if best is None else most):
                break
            if best is None:
                count //= 2
            elif beyond is None:
                count = min(2 * count, most)
            elif beyond.models - best.models <= max(1, best.models * _CLOSE):
                break
            else:
                count = (best.models + beyond.models) // 2
        return self._plan(best, beyond)

    def _plan(self, best: Trial | None, beyond: Trial | None) -> Plan:
        bottlenecks = () if beyond is None else tuple(self._bottlenecks(beyond))
        return Plan(tuple(self._trials), best, beyond, bottlenecks, self._load.grows)

    def _try(self, hardware: str, count: int) -> Trial:
        machine = self._machine(hardware)
        models = grown(self._models, count)
        result = self._run(machine, models, f"{hardware}, {count} models")
        trial = Trial(
            hardware=hardware,
            models=count,
            requests=result.requests,
            attainment=result.slo_attainment,
            ttft_p95_s=result.ttft.p95,
            tpot_p95_s=result.tpot.p95,
            use=_use(result, machine, models),
            passed=result.slo_attainment >= self._attainment,
        )
        self._trials.append(trial)
        return trial

    def _bottlenecks(self, trial: Trial) -> Iterator[Bottleneck]:
        machine = self._machine(trial.hardware)
        models = grown(self._models, trial.models)
        for what in could_bind(machine, models):
            more = RESOURCES[what](machine, _MORE)
            result = self._run(more, models, f"{trial.hardware} with more {what}")
            yield Bottleneck(what, result.slo_attainment)

    def _machine(self, hardware: str) -> SimMachine:
        return build(hardware, self._base.slices, PRESETS[self._base.policy])

    def _run(self, machine: SimMachine, models: Sequence[SimModel], what: str) -> Report:
        requests = self._load.of(models)
        simulation = prepare(self._base, models, self._watched(requests, what), machine)
        simulation.run()
        return report(simulation)

    def _watched(self, requests: Sequence[SimRequest], what: str) -> Iterator[SimRequest]:
        """Yield the requests and report progress: a simulation reads them as its time passes."""
        every = max(1, len(requests) // 100)
        for number, request in enumerate(requests):
            if number % every == 0:
                self._progress(what, number / len(requests))
            yield request
        self._progress(what, 1.0)


def grown(models: Sequence[SimModel], count: int) -> list[SimModel]:
    """Return the first `count` models of an endlessly repeated catalogue. Copies are models of
    their own."""
    found: list[SimModel] = []
    for index in range(count):
        copy, place = divmod(index, len(models))
        model = models[place]
        name = f"{model.spec.id}+{copy}" if copy else model.spec.id
        found.append(replace(model, spec=replace(model.spec, id=name)))
    return found


def _use(result: Report, machine: SimMachine, models: Sequence[SimModel]) -> Utilization:
    nodes = list(result.nodes.values())
    speeds = dict(machine.links)

    def mean(values: Iterator[float]) -> float:
        return sum(values) / len(nodes)

    return Utilization(
        busy=mean(node.busy for node in nodes),
        compute=mean(node.compute for node in nodes),
        bandwidth=mean(node.memory for node in nodes),
        link=mean(node.link for node in nodes),
        busiest_link=max(
            (link.mean_bytes_per_s / speeds[name] for name, link in result.links.items()
             if not name.endswith(".compute")), default=0.0,
        ),
        kv=mean(node.kv for node in nodes),
        pool=sum(model.spec.weight_bytes for model in models) / machine.hardware.pool_bytes,
    )  # fmt: skip
