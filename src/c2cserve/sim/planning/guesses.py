"""What simulations will come to, and how long they will take, guessed from those that have ended.

    time(models, seed) = time of the nearest catalogues * factor(seed) * factor(machine)
    missed(models)     = missed of the nearest catalogues, which grows with a power of the models

Many guesses are made of one plan, and differ in what is not known. That is where the share in time
crosses what was asked for, how steeply, by how much seeds differ, and how long simulations take.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import exp, inf, log, sqrt
from random import Random
from statistics import fmean

from c2cserve.sim.planning.trials import SeedResult, Simulated, Utilization

_GROWS = 1.8
"""The time of a simulation grows with its models to this power beyond those that are known: more
requests, and larger batches. (2 to 3 where a machine becomes busy, 1 where it has room.)"""
_LEAST_POWER, _MOST_POWER = 0.5, 3.5
_STEEP = 4.5
"""Power of the models with which requests miss, about (3 to 6), and the spread of its logarithm."""
_STEEP_SPREAD = 0.3
_FEW = 0.002
"""A smaller share of misses says nothing of where more begin."""
_LEAST = 1e-4
_CUT = 0.45
"""Part of its time that a simulation takes which is cut short."""
_LAYOUT = 0.6
"""Times as long as on the whole machine that a simulation on another layout of it takes."""
_MORE = 1.1
"""Times as long as without that a simulation with more of a resource takes."""
_BESIDE = 2
"""Simulations that what is expected of one with more of a resource counts as, beside known ones."""
_SEEDS = 0.01
"""Deviation of a seed's share from the mean,"""
_REST = 0.006
"""and what remains of it where seeds are known."""
_REST_SPREAD = 0.6

# Deviations of times from what is guessed, in logarithms.
_ALL_SPREAD = 0.1
_GROWS_SPREAD = 0.3
_SEED_SPREAD = 0.3
"""The deviation of seeds, while one alone has run,"""
_GROUP_SPREAD = 0.4
"""that of another machine, before it has run,"""
_LAYOUT_SPREAD = 0.3
"""that of another layout, or of a machine with a GPU less,"""
_OTHER_SPREAD = 0.15
"""and that of one layout, if others have run."""
_MORE_SPREAD = 0.15

_Group = tuple[str, int, bool]
"""Hardware, lost GPUs, and whether GPUs relay."""
_Curve = Sequence[tuple[float, float]]


def _group(job: Simulated) -> _Group:
    return job.hardware, job.lost, job.scenario.slices.relays


def on_line(curve: _Curve, x: float, power: float, least: float = -inf, most: float = inf) -> float:
    """Return the value at `x` on a curve of points by x, straight in logarithms. Beyond its ends,
    values grow with `power`, between two points with one from `least` to `most`."""
    below = max((one for one in curve if one[0] <= x), default=None)
    above = min((one for one in curve if one[0] >= x), default=None)
    if below and above and below[0] != above[0]:
        slope = log(above[1] / below[1]) / log(above[0] / below[0])
        power = min(max(slope, least), most)
    nearest = min((one for one in (below, above) if one), key=lambda one: abs(log(one[0] / x)))
    return nearest[1] * (x / nearest[0]) ** power


class Times:
    """Seconds of simulations."""

    def __init__(self, ended: Sequence[tuple[Simulated, SeedResult]]) -> None:
        whole = [(job, done.took_s) for job, done in ended if not done.cut]
        if not whole:
            whole = [(job, done.took_s / _CUT) for job, done in ended]
        self._home = next((_group(job) for job, _ in whole), None)
        by_count: dict[int, dict[int, float]] = defaultdict(dict)
        for job, took_s in whole:
            if _group(job) == self._home and not job.more:
                by_count[len(job.models)][job.scenario.seed] = max(1e-4, took_s)
        self._first = next((seed for took in by_count.values() for seed in took), 0)
        self._seeds = _seed_factors(by_count)
        self._curve = sorted(
            (
                float(count),
                fmean(took_s / self._seeds.get(seed, 1.0) for seed, took_s in took.items()),
            )
            for count, took in by_count.items()
        )
        self._groups: dict[_Group, float] = {}
        self._more = 0.0
        """0.0: not known."""
        if self._curve:
            others: dict[_Group, list[float]] = defaultdict(list)
            more: list[float] = []
            for job, took_s in whole:
                ratio = took_s / self._at(len(job.models), job.scenario.seed)
                if _group(job) != self._home:
                    others[_group(job)].append(ratio)
                elif job.more:
                    more.append(ratio)
            self._groups = {group: fmean(ratios) for group, ratios in others.items()}
            if more:  # some resources speed a simulation up, others slow it down
                self._more = (sum(more) + _MORE * _BESIDE) / (len(more) + _BESIDE)

    def guess(self, job: Simulated, chance: "Chance") -> float:
        """Return the seconds of a simulation that is not cut short."""
        if not self._curve:
            return 0.0
        group = _group(job)
        power = self._beyond() * chance.of("power", _GROWS_SPREAD)
        took_s = self._at(len(job.models), job.scenario.seed, power)
        if not self._seeds and job.scenario.seed != self._first:
            took_s *= chance.of("seeds", _SEED_SPREAD)
        took_s *= self._ratio(group, chance)
        if job.more:
            took_s *= self._more or _MORE * chance.of("more", _MORE_SPREAD)
        return took_s * chance.of("all", _ALL_SPREAD)

    def _ratio(self, group: _Group, chance: "Chance") -> float:
        """Return how many times as long as at home simulations take elsewhere."""
        if group == self._home:
            return 1.0
        if (known := self._groups.get(group)) is not None:
            return known
        hardware, lost, relays = group
        whole, _, layout = hardware.partition(":")
        alike = [
            ratio for (other, missing, _), ratio in self._groups.items()
            if (missing, other.partition(":")[0]) == (lost, whole) and ":" in other
        ]  # fmt: skip
        own = chance.of(str(group), _OTHER_SPREAD)
        if alike and layout:
            return fmean(alike) * own
        if lost or layout:
            of_whole = self._groups.get((whole, 0, relays), 1.0)
            chances = chance.of(f"{lost} {bool(layout)}", _LAYOUT_SPREAD) * own
            return of_whole * (_LAYOUT if layout else 1.0) * chances
        return chance.of("machines", _GROUP_SPREAD) * own

    def _beyond(self) -> float:
        """Return the power with which times grow beyond the known ones. Two of them tell a part."""
        if len(self._curve) < 2:
            return _GROWS
        (x1, y1), (x2, y2) = self._curve[-2:]
        slope = min(max(log(y2 / y1) / log(x2 / x1), _LEAST_POWER), _MOST_POWER)
        return (slope + 2.0 * _GROWS) / 3.0

    def _at(self, count: int, seed: int, power: float = _GROWS) -> float:
        between = on_line(self._curve, count, power, _LEAST_POWER, _MOST_POWER)
        return between * self._seeds.get(seed, 1.0)


class Chance:
    """Factors by chance. Of the same number and name, they are the same."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._found: dict[str, float] = {}

    def gauss(self, name: str) -> float:
        if name not in self._found:
            self._found[name] = Random(f"{self._number}/{name}").gauss(0.0, 1.0)
        return self._found[name]

    def of(self, name: str, spread: float) -> float:
        """Return a factor of median 1. `spread`: deviation of its logarithm."""
        return exp(spread * self.gauss(name))


def _seed_factors(by_count: dict[int, dict[int, float]]) -> dict[int, float]:
    """Return how many times as long as the mean of all each seed takes."""
    most = max(map(len, by_count.values()), default=0)
    ratios: dict[int, list[float]] = defaultdict(list)
    for took in by_count.values():
        if len(took) == most > 1:
            middle = fmean(took.values())
            for seed, took_s in took.items():
                ratios[seed].append(took_s / middle)
    return {seed: fmean(found) for seed, found in ratios.items()}


class Guess:
    """One possible outcome of all simulations to come. Of the same known ones and the same number,
    it is the same."""

    def __init__(
        self, ended: Sequence[tuple[Simulated, SeedResult]], times: Times, asked: float, seeds: int,
        number: int,
    ) -> None:  # fmt: skip
        """`seeds`: of a whole trial."""
        self._times, self._asked, self._seeds = times, asked, seeds
        self._chance = Chance(number)
        self._power = _STEEP * self._chance.of("steep", _STEEP_SPREAD)
        self._where = Random(f"{number}/where").random()
        self._rest = _REST * self._chance.of("rest", _REST_SPREAD)
        self._shares: dict[str, dict[int, dict[int, float]]] = {}
        self._cut: dict[str, set[int]] = defaultdict(set)
        self._busy: dict[int, float] = {}
        for job, done in ended:
            if job.more or job.lost:
                continue
            count = len(job.models)
            if done.cut:
                self._cut[job.hardware].add(count)
            else:
                machine = self._shares.setdefault(job.hardware, {})
                machine.setdefault(count, {})[job.scenario.seed] = done.attainment
            self._busy[count] = done.use.busy
        self._curves: dict[str, _Curve] = {}
        self._offsets: dict[str, dict[int, float]] = {}

    def of(self, job: Simulated) -> SeedResult:
        """Return what a simulation comes to."""
        share = self._share(job.hardware, len(job.models), job.scenario.seed)
        took_s = self._times.guess(job, self._chance)
        cut = share < job.enough
        busy = self._busy_with(len(job.models))
        use = Utilization(busy, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        took_s *= _CUT if cut else 1.0
        return SeedResult(1, share, 0.0, 0.0, use, {}, {}, cut, took_s)

    def _share(self, hardware: str, count: int, seed: int) -> float:
        if hardware not in self._curves:
            self._offsets[hardware] = self._seed_offsets(hardware)
            self._curves[hardware] = self._curve(hardware)
        missed = on_line(self._curves[hardware], count, self._power)
        rest = self._rest * self._chance.gauss(f"{hardware}/{count}/{seed}")
        offset = self._offset(hardware, seed) + rest
        return min(1.0, max(0.0, 1.0 - missed + offset))

    def _offset(self, hardware: str, seed: int) -> float:
        known = self._offsets[hardware].get(seed)
        return _SEEDS * self._chance.gauss(f"seed {seed}") if known is None else known

    def _seed_offsets(self, hardware: str) -> dict[int, float]:
        """Return by how much each seed's share is above the mean, by what most seeds simulated."""
        known = self._shares.get(hardware, {}).values()
        shares = max(known, key=len, default=dict[int, float]())
        if len(shares) < 2:
            return {}
        middle = fmean(shares.values())
        return {seed: share - middle for seed, share in shares.items()}

    def _curve(self, hardware: str) -> _Curve:
        """Return which shares of the requests miss, by models, as far as that is known, and at one
        guess."""
        missed = {
            count: self._missed(hardware, count, shares)
            for count, shares in self._shares.get(hardware, {}).items()
        }
        may = 1.0 - self._asked
        few = min(_FEW, may)
        points = {float(count): share for count, share in missed.items() if share > few}
        failed = [count for count, share in missed.items() if share > may]
        if not failed:
            passed = max(missed, default=0)
            beyond = min((one for one in self._cut[hardware] if one > passed), default=0)
            points[self._crossing(passed, beyond, points.get(passed, 0.0))] = max(may, _LEAST)
        return sorted(points.items())

    def _missed(self, hardware: str, count: int, shares: Mapping[int, float]) -> float:
        """Return the mean over all seeds, as far as some of them tell."""
        missed = 1.0 - fmean(shares.values())
        if missed <= _FEW:
            return missed
        offset = fmean(self._offset(hardware, seed) for seed in shares)
        error = self._rest * self._chance.gauss(f"{hardware}/{count}")
        error *= sqrt(max(0.0, 1.0 / len(shares) - 1.0 / self._seeds))
        return max(missed + offset + error, _FEW)

    def _crossing(self, passed: int, beyond: int, missed: float) -> float:
        """Return where trials begin to fail. `missed`: of the largest that passed; 0.0: too few to
        go by. 0 models: none has passed, or none is too many."""
        low = max(passed, 1) if passed or not beyond else beyond / 4
        busy = max(0.05, self._busy.get(passed, 1.0))
        high = beyond or max(1.05, 1.6 / busy) * low
        if not beyond:
            low = max(1.02, min(1.0 / busy, 8.0)) * low
        if missed:
            low = max(low, 1.0) if beyond else float(passed)
            likely = passed * ((1.0 - self._asked) / missed) ** (1.0 / self._power)
            return min(max(likely, 1.01 * low), max(0.99 * high, 1.01 * low))
        return low * (high / low) ** (0.1 + 0.8 * self._where)

    def _busy_with(self, count: int) -> float:
        if not self._busy:
            return 1.0
        nearest = min(self._busy, key=lambda one: abs(log(one / count)))
        return min(1.0, self._busy[nearest] * count / nearest)
