"""Finds how many models a machine serves within targets, or which machine serves a catalogue.

A *trial* is one simulation for each seed (`sim.planning.trials`). It passes if the mean share of
requests that met both targets is at least what was asked for. The search for the largest catalogue
doubles (or halves) with one seed until one trial passes and one fails. Then it bisects between them
with all seeds, which also confirm both ends.

The bottleneck is found by experiment, in the failed trial that came closest. One resource after the
other is raised by half, and the resource that helps most is the bottleneck.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from typing import Any

from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.sim.planning.bottleneck import could_bind
from c2cserve.sim.planning.trials import Trial, Trials, gpus, load_of
from c2cserve.sim.run import Scenario
from c2cserve.sim.world.hardware import SimMachine, build, find
from c2cserve.sim.world.shapes import SimModel

_HELPS = 0.002
"""Share of all requests. A resource that helps fewer is not the bottleneck."""
_CLOSE = 0.02
"""The search ends when the smallest failing catalogue is larger by at most this share."""

Progress = Callable[[str, int, int], None]
"""Receives what was simulated, how many simulations have ended, and how many are to come: those
that are sure, and a search's share of halvings."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    what: str
    attainment: float
    """Attainment with half as much again of the resource."""


@dataclass(frozen=True, slots=True)
class Dedicated:
    """The same catalogue with GPUs of its own for each model."""

    gpus: int
    shared_gpus: int
    """Those of the planned machine."""
    cost: float | None
    """A month's, with the price that was given; None: none was."""
    shared_cost: float | None


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
    layouts: tuple[Trial, ...] = ()
    """`best` on the machine's other layouts, if they were asked for."""
    spare: Trial | None = None
    """`best` with one GPU less, if that was asked for and one is left."""
    dedicated: Dedicated | None = None
    without_relays: Trial | None = None
    """`best` with one link for each GPU, if the plan is of GPUs that relay for each other."""

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


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a plan has besides its answer."""

    seeds: int = 1
    layouts: bool = False
    """The answer on the machine's other layouts."""
    spare: bool = False
    """The answer with one GPU less (N+1)."""
    gpu_month: float | None = None
    """Price of a GPU for a month, in any currency."""


class Planner:
    """Runs the trials of one search.

    `base` is all but hardware and catalogue. `models` is the catalogue; larger ones repeat it."""

    def __init__(
        self, base: Scenario, models: Sequence[SimModel], attainment: float, progress: Progress,
        wishes: Wishes | None = None, executor: Executor | None = None,
    ) -> None:  # fmt: skip
        """Simulations run on `executor`, or in this process. Raises OSError, ValueError (and its
        kinds)."""
        self._base, self._models = base, models
        self._wishes = wishes or Wishes()
        self._progress = progress
        self._grows = load_of(base).grows
        self._runner = Trials(base, attainment, self._wishes.seeds, executor, self._ran)
        self._trials: list[Trial] = []
        self._done = self._left = 0

    def smallest_machine(self, machines: Sequence[str]) -> Plan:
        """Try `machines`, given from small to large, until one passes.

        Raises ValueError (and its kinds)."""
        beyond: Trial | None = None
        for number, hardware in enumerate(machines):
            self._expect(len(machines) - number)
            trial = self._try(hardware, len(self._models))
            if trial.passed:
                return self._plan(trial, beyond)
            beyond = trial
        return self._plan(None, beyond)

    def largest_catalogue(self, hardware: str, most: int) -> Plan:
        """Search up to `most` models. Raises ValueError (and its kinds)."""
        trials: dict[int, Trial] = {}
        passed, failed = self._bracket(hardware, most, trials)
        while True:
            if failed - passed > _stride(passed):
                count = (passed + failed) // 2
            elif passed and passed not in trials:
                count = passed
            elif failed and failed not in trials:
                count = failed
            else:
                return self._plan(trials.get(passed), trials.get(failed))
            self._expect(1 + ceil(log2(max(1, failed - passed))))
            trial = trials[count] = self._try(hardware, count)
            if trial.passed:
                # What passed beyond a failure says that the failure of one seed was chance.
                passed, failed = count, failed if failed > count else _beyond(count, most)
            else:
                failed, passed = count, passed if passed < count else count // 2

    def _bracket(self, hardware: str, most: int, trials: dict[int, Trial]) -> tuple[int, int]:
        """Double or halve the catalogue until one passes with the first seed and one fails. Return
        both counts; 0: there is none. `trials` gets those that are complete with one seed."""
        passed = failed = 0
        count = min(len(self._models), most)
        while True:
            self._expect(5, 3)
            trial = self._try(hardware, count, seeds=1)
            if self._wishes.seeds == 1:
                trials[count] = trial
            if trial.passed:
                passed = count
            else:
                failed = count
            if (passed and failed) or count == (most if passed else 1):
                return passed, failed
            count = min(2 * count, most) if passed else count // 2

    def _expect(self, trials: int, singles: int = 0) -> None:
        """Note how many simulations are to come: `trials` with all seeds, `singles` with one, and
        those that follow the search."""
        after = 4 + self._wishes.spare + 3 * self._wishes.layouts + self._base.slices.relays
        self._left = singles + (trials + after) * self._wishes.seeds

    def _ran(self, what: str) -> None:
        self._done += 1
        self._left = max(0, self._left - 1)
        self._progress(what, self._done, self._left)

    def _try(self, hardware: str, count: int, seeds: int | None = None) -> Trial:
        trial = self._runner.run(hardware, grown(self._models, count), seeds=seeds)
        self._trials.append(trial)
        return trial

    # ---- what follows from the answer -----------------------------------------------------------

    def _plan(self, best: Trial | None, beyond: Trial | None) -> Plan:
        trials = tuple(self._trials)
        bottlenecks = () if beyond is None else tuple(self._bottlenecks(beyond))
        found = Plan(trials, best, beyond, bottlenecks, self._grows)
        if best is None:
            return found
        models = grown(self._models, best.models)
        machine = self._machine(best.hardware)
        layouts: list[Trial] = []
        for name in other_layouts(best.hardware) if self._wishes.layouts else ():
            layouts.append(self._runner.run(name, models))
        spare = None
        if self._wishes.spare and len(gpus(machine)) > 1:
            spare = self._runner.run(best.hardware, models, lost=1)
        return replace(
            found, layouts=tuple(layouts), spare=spare,
            dedicated=self._dedicated(machine, models),
            without_relays=self._without_relays(machine, best.hardware, models),
        )  # fmt: skip

    def _without_relays(
        self, machine: SimMachine, hardware: str, models: Sequence[SimModel]
    ) -> Trial | None:
        if not any(one.relays for one in machine.slices):
            return None
        base = replace(self._base, slices=replace(self._base.slices, relays=False))
        return self._runner.of(base).run(hardware, models)

    def _bottlenecks(self, trial: Trial) -> Iterator[Bottleneck]:
        models = grown(self._models, trial.models)
        for what in could_bind(self._machine(trial.hardware), models):
            result = self._runner.run(trial.hardware, models, more=what)
            yield Bottleneck(what, result.attainment)

    def _machine(self, hardware: str) -> SimMachine:
        return build(hardware, self._base.slices, PRESETS[self._base.policy])

    def _dedicated(self, machine: SimMachine, models: Sequence[SimModel]) -> Dedicated | None:
        """Return what it takes to give each model GPUs of its own. Its weights must fit into their
        memory beside KV's share. None: the machine has no GPU."""
        names = gpus(machine)
        if not names:
            return None
        one_gpu = [one.slice.hbm_bytes for one in machine.slices if one.node == names[0]]
        room = sum(one_gpu) * max(0.5, 1.0 - self._base.slices.kv_share)
        count = sum(ceil(model.spec.weight_bytes / room) for model in models)
        price = self._wishes.gpu_month
        costs = (None, None) if price is None else (price * count, price * len(names))
        return Dedicated(count, len(names), *costs)


def _stride(models: int) -> int:
    return max(1, int(models * _CLOSE))


def _beyond(models: int, most: int) -> int:
    """Return the next larger catalogue to try; 0: there is none."""
    return 0 if models >= most else min(most, models + max(1, models // 4))


def other_layouts(hardware: str) -> list[str]:
    """Return the machine with each layout of its GPUs but the one that it names (or its first).

    Raises UnknownHardware."""
    base, _, chosen = hardware.partition(":")
    layouts = next((list(one.layouts) for one in find(base).devices if one.h2d_bytes_per_s > 0), [])
    chosen = chosen or (layouts[0] if layouts else "")
    return [f"{base}:{name}" for name in layouts if name != chosen]


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
