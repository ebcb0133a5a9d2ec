"""The time left of a plan is true: plans run again with the times that their simulations took."""

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from c2cserve.sim.planning.bottleneck import RESOURCES
from c2cserve.sim.planning.plan import Plan, Planner
from c2cserve.sim.planning.result import Wishes
from c2cserve.sim.planning.time_left import TimeLeft
from c2cserve.sim.planning.trials import SeedResult, Simulated, Utilization
from c2cserve.sim.run import Scenario
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.shapes import catalogue, interleaved

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_plans.json").read_text())
"""Plans of `slinfer128`, compiled, with five seeds. Rows: models, seed, more of which resource,
whether it might be cut short, share in time, whether it was, share of the time that steps ran, CPU
seconds."""
_START_S = 1.0


class Later(Future[SeedResult]):
    """A result that is there at a moment of virtual time, which waiting for it reaches."""

    def __init__(self, processors: "Processors", end_s: float) -> None:
        super().__init__()
        self._processors, self._end_s = processors, end_s

    def result(self, timeout: float | None = None) -> SeedResult:
        self._processors.now_s = max(self._processors.now_s, self._end_s)
        return super().result(timeout)


class Processors(Executor):
    """Runs recorded simulations in virtual time, first come, first served."""

    def __init__(self, rows: list[list[Any]], width: int) -> None:
        self.now_s = 0.0
        self._free_s = [_START_S] * width
        self._rows = {tuple(row[:4]): row[4:] for row in rows}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        [job] = args
        assert isinstance(job, Simulated)
        key = (len(job.models), job.scenario.seed, job.more, int(bool(job.enough)))
        share, cut, busy, took_s = self._rows[key]
        begin_s = max(self.now_s, min(self._free_s))
        self._free_s[self._free_s.index(min(self._free_s))] = begin_s + took_s
        use = Utilization(busy, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        later = Later(self, begin_s + took_s)
        later.set_result(SeedResult(1, share, 0.0, 0.0, use, {}, {}, bool(cut), took_s))
        return later


def run_again(name: str) -> tuple[Plan, float, list[tuple[float, float]]]:
    """Return the plan, its duration, and when it said that how many seconds were left."""
    recorded = RECORDED[name]
    said: list[tuple[float, float]] = []
    processors = Processors(recorded["rows"], 2)
    base = Scenario("", "", WorkloadSettings("slinfer128", mapping="shuffle"))
    planner = Planner(
        base, interleaved(catalogue(recorded["catalog"])), recorded["asked"],
        lambda what, done, left_s: said.append((processors.now_s, left_s)),
        Wishes(5), processors, 2, lambda: processors.now_s,
    )  # fmt: skip
    return planner.largest_catalogue(recorded["hardware"], 1024), processors.now_s, said


def wrong_by(name: str) -> float:
    """Return how many times too long or too short the time left was, after a fifth of the time. A
    second does not count."""
    _, end_s, said = run_again(name)
    factors = [1.0]
    for now_s, left_s in said:
        true_s = end_s - now_s
        if now_s >= end_s / 5 and abs(left_s - true_s) > 1.0:
            factors += [left_s / true_s, true_s / left_s]
    return max(factors)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("3B", 1.5), ("3B, 99 %", 1.5), ("8B on GH200", 1.65), ("3B and 8B on two H200", 1.8),
        ("7B on A100s and CPUs", 1.9),
    ],
)  # fmt: skip
def test_the_time_left_is_true_after_a_fifth(name: str, most: float) -> None:
    assert wrong_by(name) < most


@pytest.mark.parametrize("name", RECORDED)
def test_the_time_left_does_not_jump(name: str) -> None:
    """It runs down, and what a trial changes is a part of it."""
    _, end_s, said = run_again(name)
    late = [one for one in said if one[0] >= end_s / 3 and one[1] > 1.0]
    for (before_s, was_s), (now_s, left_s) in pairwise(late):
        expected_s = was_s - (now_s - before_s)
        assert 1 / 1.5 < left_s / expected_s < 1.5


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_plans_have_their_answers(name: str) -> None:
    plan, _, said = run_again(name)
    assert plan.best is not None
    assert plan.beyond is not None
    assert [plan.best.models, plan.beyond.models, plan.binds] == RECORDED[name]["answer"]
    assert plan.best.seeds == plan.beyond.seeds == 5
    assert said[-1][1] == 0.0


@pytest.mark.parametrize(("share", "left_s"), [(0.97, 1.5), (0.9, 1.5 + 3.0 + 3.0)])
def test_the_next_machine_counts_only_where_this_one_seems_to_fail(
    share: float, left_s: float
) -> None:
    """Two seeds of five are done, a second each. Another machine takes three times of two at once,
    and experiments three."""
    said: list[float] = []
    rows = [[4, seed, "", 0, share, 0, 0.5, 1.0] for seed in range(5)]
    rows += [[4, seed, more, 0, share, 0, 0.5, 1.0] for seed in range(2) for more in RESOURCES]
    processors = Processors(rows, 2)
    planner = Planner(
        Scenario("", "", WorkloadSettings("slinfer128")), catalogue("llama-3.1-8b*4"), 0.95,
        lambda what, done, left: said.append(left), Wishes(5), processors, 2,
        lambda: processors.now_s,
    )  # fmt: skip
    planner.smallest_machine(["h200-x1", "h200-x2"])
    assert said[1] == pytest.approx(left_s)
    assert said[-1] == 0.0


def test_time_left_goes_by_simulations_of_about_as_many_models() -> None:
    left = TimeLeft(width=2)
    assert left.left_s((8, 3), [], 0.0, bounded=False) == 0.0
    left.note(8, 1.0)
    left.note(64, 8.0)
    assert left.left_s((8, 3), [(16, 3)], 0.0, bounded=False) == pytest.approx(1.5 + 4.0)
    assert left.left_s((128, 2), [], 0.0, bounded=False) == pytest.approx(8.0 * 2**1.5)


def test_a_guess_changes_the_time_left_by_a_part() -> None:
    left = TimeLeft(width=1)
    left.note(8, 1.0)
    assert left.left_s((8, 10), [], 0.0, bounded=False) == 10.0
    assert left.left_s((8, 9), [(8, 100)], 1.0, bounded=True) == pytest.approx(9.0 * 1.3)
