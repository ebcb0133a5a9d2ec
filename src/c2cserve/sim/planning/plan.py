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
from dataclasses import replace
from itertools import count
from math import ceil
from statistics import mean
from time import monotonic

from c2cserve.sim.planning.bottleneck import could_bind
from c2cserve.sim.planning.estimates import Estimates
from c2cserve.sim.planning.result import Bottleneck, Dedicated, Plan, Wishes
from c2cserve.sim.planning.search import Search
from c2cserve.sim.planning.time_left import Left, TimeLeft
from c2cserve.sim.planning.timeline import Here, Log
from c2cserve.sim.planning.trials import Ran, Trial, Trials, gpus, load_of
from c2cserve.sim.run import Scenario, preset_of
from c2cserve.sim.world.hardware import SimMachine, build, find
from c2cserve.sim.world.shapes import SimModel

_CLOSEST = 2
"""Resources that are tried with a second seed. Experiments are compared with the same seeds of the
trial, so few are enough."""

Progress = Callable[[str, int, Left], None]
"""Receives what was simulated, how many simulations have ended, and the time that is left."""


class Planner:
    """Answers what a machine serves, or which machine is enough, and says how long that takes."""

    def __init__(
        self, base: Scenario, models: Sequence[SimModel], attainment: float, progress: Progress,
        wishes: Wishes | None = None, executor: Executor | None = None, width: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        """`base` is all but hardware and catalogue. `models` is the catalogue; larger ones repeat
        it. Simulations run on `executor`, `width` at a time, or one by one in this process. Raises
        OSError, ValueError (and its kinds)."""
        self._question = Question(base, models, attainment, wishes or Wishes(), width)
        self._progress, self._clock = progress, clock
        self._log = Log(executor or Here(), clock)

    def smallest_machine(self, machines: Sequence[str]) -> Plan:
        """Try `machines`, given from small to large, until one passes.

        Raises ValueError (and its kinds)."""
        for hardware in machines:
            self._question.machine(hardware)
        return self._run(lambda search: search.smallest_machine(machines))

    def largest_catalogue(self, hardware: str, most: int) -> Plan:
        """Search up to `most` models. Raises ValueError (and its kinds)."""
        self._question.machine(hardware)
        return self._run(lambda search: search.largest_catalogue(hardware, most))

    def _run(self, steps: "Callable[[PlanSearch], Plan]") -> Plan:
        """Make all `steps` of a plan. The time left is foretold with the same ones."""
        question, done = self._question, count(1)

        def again(executor: Executor) -> Plan:
            return steps(PlanSearch(question, executor, lambda what, job, result: None))

        left = TimeLeft(
            self._log, again, question.attainment, question.wishes.seeds, question.width,
            self._clock,
        )  # fmt: skip
        return steps(
            PlanSearch(
                question, self._log,
                lambda what, job, result: self._progress(what, next(done), left.now()),
            )
        )  # fmt: skip


class Question:
    """What a plan is asked, and the catalogues and machines that it tries."""

    def __init__(
        self, base: Scenario, models: Sequence[SimModel], attainment: float, wishes: Wishes,
        width: int,
    ) -> None:  # fmt: skip
        """Raises OSError, ValueError (and its kinds)."""
        load = load_of(base)
        if load.empty:
            raise ValueError("the trace has no requests in this time")
        self.grows = load.grows
        self.base, self.models, self.attainment = base, models, attainment
        self.wishes, self.width = wishes, width
        self._catalogues: dict[int, tuple[SimModel, ...]] = {}
        self._machines: dict[str, SimMachine] = {}

    def catalogue(self, count: int) -> tuple[SimModel, ...]:
        if count not in self._catalogues:
            self._catalogues[count] = tuple(grown(self.models, count))
        return self._catalogues[count]

    def machine(self, hardware: str) -> SimMachine:
        """Raises ValueError (and its kinds)."""
        if hardware not in self._machines:
            found = build(hardware, self.base.slices, preset_of(self.base))
            self._machines[hardware] = found
        return self._machines[hardware]


class PlanSearch:
    """Runs the trials of one search."""

    def __init__(self, question: Question, executor: Executor, ran: Ran) -> None:
        self._base, self._models = question.base, question.models
        self._question, self._wishes = question, question.wishes
        seeds = self._wishes.seeds
        self._attainment = question.attainment
        self._runner = Trials(self._base, self._attainment, seeds, executor, ran, question.width)
        self._trials: list[Trial] = []
        self._estimates = Estimates(seeds)
        self._compared = set[int]()
        """Catalogues that were tried with as many seeds as it took."""

    def smallest_machine(self, machines: Sequence[str]) -> Plan:
        """Try `machines`, given from small to large, until one passes.

        Raises ValueError (and its kinds)."""
        beyond: Trial | None = None
        for hardware in machines:
            trial = self._try(hardware, len(self._models))
            if trial.passed:
                return self._plan(trial, beyond)
            beyond = trial
        return self._plan(None, beyond)

    def largest_catalogue(self, hardware: str, most: int) -> Plan:
        """Search up to `most` models. Raises ValueError (and its kinds)."""
        self._question.machine(hardware)
        trials: dict[int, Trial] = {}
        search = self._bracket(hardware, most, trials)
        while (count := search.next()) is not None:
            several = search.between and self._wishes.seeds > 1
            if not several:
                self._begin_last(hardware, search)
            trial = trials[count] = self._try(hardware, count, enough=several)
            self._note(search, trial)
        found = self._plan(trials.get(search.passed), trials.get(search.failed))
        return replace(found, most=most)

    def _begin_last(self, hardware: str, search: Search) -> None:
        """Begin what is left once the ends are close: to confirm them, and the experiments."""
        for end in search.unconfirmed:
            self._runner.begin(hardware, self._question.catalogue(end))
        if search.failed and self._sure_of_ends(search):
            models = self._question.catalogue(search.failed)
            names = could_bind(self._question.machine(hardware), models)
            self._runner.begin_with_more(hardware, models, names)

    def _bracket(self, hardware: str, most: int, trials: dict[int, Trial]) -> Search:
        """Double or halve the catalogue until one passes with the first seed and one fails, and
        try the middle. `trials` gets them."""
        search = Search(self._attainment, most)
        cut = self._wishes.seeds > 1
        count = min(len(self._models), most)
        last: Trial | None = None
        while True:
            for soon in (count, self._soon(search, count, last)):
                if 0 < soon <= most:
                    self._runner.begin(hardware, self._question.catalogue(soon), seeds=1, cut=cut)
            last = trials[count] = self._try(hardware, count, seeds=1, cut=cut)
            self._note(search, last)
            if count == (most if last.passed else 1):
                return search
            if search.passed and search.failed:
                break
            count = min(2 * count, most) if last.passed else count // 2
        if cut and search.middle:
            count = search.middle
            trials[count] = self._try(hardware, count, seeds=1, cut=True)
            self._note(search, trials[count])
        return search

    def _sure_of_ends(self, search: Search) -> bool:
        """Whether no end is one by the first seed alone."""
        return self._wishes.seeds == 1 or self._compared.issuperset(search.unconfirmed)

    def _soon(self, search: Search, count: int, last: Trial | None) -> int:
        """Return what to try after `count`, if that goes as is expected of it; 0: not known.

        More models than keep the machine busy all the time are expected to fail."""
        if last is None or not last.passed:
            return count // 2 if search.failed else 2 * count
        if last.use.busy * count < last.models:
            return 2 * count
        return replace(search, failed=count).middle

    def _note(self, search: Search, trial: Trial) -> None:
        """Note a trial, and what it says of the others."""
        complete = trial.seeds == self._wishes.seeds and not trial.cut
        search.note(trial.models, trial.attainment, passed=trial.passed, complete=complete)
        search.revise(self._estimates.all())

    def _try(
        self, hardware: str, count: int, seeds: int | None = None, *, cut: bool = False,
        enough: bool = False,
    ) -> Trial:  # fmt: skip
        """Make a trial. `enough`: only with as many seeds as it takes to be sure of its side."""

        def sure(seed: int, share: float) -> bool:
            self._estimates.note(count, seed, share)
            return self._estimates.surely(count, self._attainment)

        models = self._question.catalogue(count)
        trial = self._runner.run(
            hardware, models, seeds=seeds, cut=cut, enough=sure if enough else None
        )
        if not trial.cut:
            for seed, share in enumerate(trial.shares):
                self._estimates.note(count, seed, share)
        if enough:
            self._compared.add(count)
            share = self._estimates.expected(count)
            trial = replace(trial, attainment=share, passed=share >= self._attainment)
        again = (hardware, count)
        self._trials = [one for one in self._trials if (one.hardware, one.models) != again]
        self._trials.append(trial)
        return trial

    def _plan(self, best: Trial | None, beyond: Trial | None) -> Plan:
        trials = tuple(self._trials)
        names = other_layouts(best.hardware) if best and self._wishes.layouts else []
        bottlenecks = () if beyond is None else tuple(self._bottlenecks(beyond))
        found = Plan(trials, best, beyond, bottlenecks, self._question.grows)
        if best is None:
            return found
        models = self._question.catalogue(best.models)
        machine = self._question.machine(best.hardware)
        layouts: list[Trial] = []
        for name in names:
            layouts.append(self._runner.run(name, models))
        spare = None
        if self._wishes.spare and len(gpus(machine)) > 1:
            spare = self._runner.run(best.hardware, models, lost=1)
        missing: list[str] = []
        if self._wishes.layouts and not names:
            missing.append(f"{best.hardware} has no other layouts.")
        if self._wishes.spare and spare is None:
            missing.append(f"With one GPU less (N+1): {best.hardware} has none besides.")
        return replace(
            found, layouts=tuple(layouts), spare=spare, missing=tuple(missing),
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
        """Yield what more of each resource brings, by one seed of the trial or its first two."""
        names = could_bind(
            self._question.machine(trial.hardware), self._question.catalogue(trial.models)
        )
        rounds = 2 if len(trial.shares) > 1 else 1
        found = {what: [share] for what, share in self._with_more(trial, names, 0)}
        if rounds > 1:
            closest = sorted(names, key=lambda what: -found[what][0])[:_CLOSEST]
            for what, share in self._with_more(trial, closest, 1):
                found[what].append(share)
        for what, shares in found.items():
            seeds = len(shares)
            yield Bottleneck(what, mean(shares), mean(trial.shares[:seeds]), seeds)

    def _with_more(
        self, trial: Trial, names: Sequence[str], seed: int
    ) -> Iterator[tuple[str, float]]:
        models = self._question.catalogue(trial.models)
        shares = self._runner.with_more(trial.hardware, models, names, seed)
        return zip(names, shares, strict=True)

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
