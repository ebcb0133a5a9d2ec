"""Finds how many models a machine serves within targets, or which machine serves a catalogue.

A *trial* is one simulation for each seed (`sim.planning.trials`). It passes if the mean share of
requests that met both targets is at least what was asked for. The search for the largest catalogue
doubles (or halves) with one seed until one trial passes and one fails. Then it goes on between them
with all seeds (`sim.planning.search`), which also confirm both ends. A trial that cannot pass any
more ends at once, unless it is such an end. No simulation runs twice. What is needed next begins
while a processor is idle.

The bottleneck is found by experiment, in the failed trial that came closest. Each resource is
raised by half, with the first seed. The two that help most are tried with the second seed too, and
the one that helps more is the bottleneck.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from math import ceil
from statistics import mean
from typing import Any

from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.sim.planning.bottleneck import could_bind
from c2cserve.sim.planning.search import Search
from c2cserve.sim.planning.time_left import TimeLeft
from c2cserve.sim.planning.trials import SeedResult, Simulated, Trial, Trials, gpus, load_of
from c2cserve.sim.run import Scenario
from c2cserve.sim.world.hardware import SimMachine, build, find
from c2cserve.sim.world.shapes import SimModel

_HELPS = 0.002
"""Share of all requests. A resource that helps fewer is not the bottleneck."""
_CLOSEST = 2
"""Resources that are tried with a second seed. Experiments are compared with the same seeds of the
trial, so few are enough."""
_EXPERIMENTS = 6
"""Simulations of experiments, about: of four resources or five, and of the closest ones again."""

Progress = Callable[[str, int, float], None]
"""Receives what was simulated, how many simulations have ended, and the seconds that those to come
will take (`TimeLeft`). The trials of a search are guessed."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    what: str
    attainment: float
    """Attainment with half as much again of the resource, over the first seeds of the trial,"""
    before: float
    """and without, over the same seeds."""
    seeds: int = 1

    @property
    def gain(self) -> float:
        return self.attainment - self.before


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
        seeds = max(one.seeds for one in self.bottlenecks)
        closest = (one for one in self.bottlenecks if one.seeds == seeds)
        most = max(closest, key=lambda one: one.gain)
        return most.what if most.gain > _HELPS else ""

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
        wishes: Wishes | None = None, executor: Executor | None = None, width: int = 1,
    ) -> None:  # fmt: skip
        """Simulations run on `executor`, `width` at a time, or in this process. Raises OSError,
        ValueError (and its kinds)."""
        self._base, self._models = base, models
        self._wishes = wishes or Wishes()
        self._progress = progress
        self._grows = load_of(base).grows
        seeds = self._wishes.seeds
        self._runner = Trials(base, attainment, seeds, executor, self._ran, width)
        self._attainment = attainment
        self._trials: list[Trial] = []
        self._time = TimeLeft(width)
        self._done = self._of_trial = 0
        """Simulations that have ended, and those of this trial that are to come."""
        self._after: list[tuple[int, int]] = []
        """Models and simulations of what follows this trial."""
        self._others = self._wishes.spare + 3 * self._wishes.layouts + base.slices.relays
        """Trials to come that the wishes ask for."""

    def smallest_machine(self, machines: Sequence[str]) -> Plan:
        """Try `machines`, given from small to large, until one passes.

        Raises ValueError (and its kinds)."""
        beyond: Trial | None = None
        for number, hardware in enumerate(machines):
            count, seeds = len(self._models), self._wishes.seeds
            self._expect(count, seeds, [(count, seeds)] * (len(machines) - number - 1))
            trial = self._try(hardware, count)
            if trial.passed:
                return self._plan(trial, beyond)
            beyond = trial
        return self._plan(None, beyond)

    def largest_catalogue(self, hardware: str, most: int) -> Plan:
        """Search up to `most` models. Raises ValueError (and its kinds)."""
        trials: dict[int, Trial] = {}
        search = self._bracket(hardware, most, trials)
        seeds = self._wishes.seeds
        while (count := search.next()) is not None:
            missing = self._runner.missing(hardware, grown(self._models, count))
            self._expect(count, missing, [(count, seeds)] * (search.trials_left - 1))
            # An end of the search is simulated as a whole: the answer has its figures.
            cut = search.between and seeds > 1
            for end in () if cut else search.unconfirmed:
                self._runner.begin(hardware, grown(self._models, end))
            trial = trials[count] = self._try(hardware, count, cut=cut)
            search.note(count, trial.attainment, passed=trial.passed, complete=not trial.cut)
        return self._plan(trials.get(search.passed), trials.get(search.failed))

    def _bracket(self, hardware: str, most: int, trials: dict[int, Trial]) -> Search:
        """Double or halve the catalogue until one passes with the first seed and one fails.
        `trials` gets them."""
        search = Search(self._attainment, most)
        alone = self._wishes.seeds == 1
        count = min(len(self._models), most)
        while True:
            self._expect(count, 1, [(count, self._wishes.seeds)] * 4)
            following = count // 2 if search.failed else 2 * count
            for soon in (count, following) if 0 < following <= most else ():
                self._runner.begin(hardware, grown(self._models, soon), seeds=1, cut=not alone)
            trial = trials[count] = self._try(hardware, count, seeds=1, cut=not alone)
            search.note(count, trial.attainment, passed=trial.passed, complete=alone)
            if (search.passed and search.failed) or count == (most if trial.passed else 1):
                return search
            count = min(2 * count, most) if trial.passed else count // 2

    def _expect(
        self, models: int, simulations: int, later: Sequence[tuple[int, int]] = (), *,
        searching: bool = True,
    ) -> None:  # fmt: skip
        """Note what is to come: a trial, `later` ones (models and simulations), experiments after
        a search, and what else was asked for."""
        last = later[-1][0] if later else models
        self._of_trial = simulations
        self._after = [*later, *[(last, self._wishes.seeds)] * self._others]
        if searching:
            self._after.append((last, _EXPERIMENTS))

    def _ran(self, what: str, job: Simulated, done: SeedResult) -> None:
        self._done += 1
        self._of_trial = max(0, self._of_trial - 1)
        models = len(job.models)
        if not done.cut or self._done == 1:
            self._time.note(models, done.took_s)
        left_s = self._time.of(models, self._of_trial)
        left_s += sum(self._time.of(count, simulations) for count, simulations in self._after)
        self._progress(what, self._done, left_s)

    def _try(
        self, hardware: str, count: int, seeds: int | None = None, *, cut: bool = False
    ) -> Trial:
        models = grown(self._models, count)
        trial = self._runner.run(hardware, models, seeds=seeds, cut=cut)
        self._trials.append(trial)
        return trial

    # ---- what follows from the answer -----------------------------------------------------------

    def _plan(self, best: Trial | None, beyond: Trial | None) -> Plan:
        trials = tuple(self._trials)
        names = other_layouts(best.hardware) if best and self._wishes.layouts else []
        self._others = len(names) + bool(best and self._wishes.spare) + self._base.slices.relays
        bottlenecks = () if beyond is None else tuple(self._bottlenecks(beyond))
        found = Plan(trials, best, beyond, bottlenecks, self._grows)
        if best is None:
            return found
        models = grown(self._models, best.models)
        machine = self._machine(best.hardware)
        layouts: list[Trial] = []
        for name in names:
            self._another(best.models)
            layouts.append(self._runner.run(name, models))
        spare = None
        if self._wishes.spare and len(gpus(machine)) > 1:
            self._another(best.models)
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
        self._another(len(models))
        base = replace(self._base, slices=replace(self._base.slices, relays=False))
        return self._runner.of(base).run(hardware, models)

    def _another(self, models: int) -> None:
        """Note that one of the trials begins that the wishes ask for."""
        self._others -= 1
        self._expect(models, self._wishes.seeds, searching=False)

    def _bottlenecks(self, trial: Trial) -> Iterator[Bottleneck]:
        """Yield what more of each resource brings, by one seed of the trial or its first two."""
        names = could_bind(self._machine(trial.hardware), grown(self._models, trial.models))
        rounds = 2 if len(trial.shares) > 1 else 1
        self._expect(
            trial.models, len(names), [(trial.models, _CLOSEST)] * (rounds - 1), searching=False
        )
        found = {what: [share] for what, share in self._with_more(trial, names, 0)}
        if rounds > 1:
            closest = sorted(names, key=lambda what: -found[what][0])[:_CLOSEST]
            self._expect(trial.models, len(closest), searching=False)
            for what, share in self._with_more(trial, closest, 1):
                found[what].append(share)
        for what, shares in found.items():
            seeds = len(shares)
            yield Bottleneck(what, mean(shares), mean(trial.shares[:seeds]), seeds)

    def _with_more(
        self, trial: Trial, names: Sequence[str], seed: int
    ) -> Iterator[tuple[str, float]]:
        models = grown(self._models, trial.models)
        shares = self._runner.with_more(trial.hardware, models, names, seed)
        return zip(names, shares, strict=True)

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
