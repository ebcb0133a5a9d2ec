"""What is measured, in what order, and what happens when the time is up: all with a fake clock."""

from collections import Counter
from pathlib import Path

import pytest
from fake_bench import H200, RATES, FakeBench

from c2cserve.kernels.gpu.gemm.choice.choose import Chooser
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, load_profile, save_profile
from c2cserve.kernels.gpu.gemm.choice.rates import Rates
from c2cserve.kernels.gpu.gemm.dataflows.table import PUBLISHED, DataflowName, modelled
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.profiling.survey import (
    MATMUL_ROWS,
    READ_CTAS,
    ROWS,
    Part,
    Refused,
    Task,
    chain_length,
    parts,
    plan,
    survey,
)

FOREVER_S = 1e6
FULL_S, QUICK_S = 150.0, 40.0


def run(bench: FakeBench, budget_s: float = FOREVER_S) -> Profile:
    return survey(bench, commit="abc", until_s=bench.now_s + budget_s, clock=bench.clock)


@pytest.fixture(scope="module")
def full() -> Profile:
    return run(FakeBench(), FULL_S)


@pytest.fixture(scope="module")
def quick() -> Profile:
    return run(FakeBench(), QUICK_S)


@pytest.fixture(scope="module")
def endless() -> Profile:
    return run(FakeBench())


# What is in it


def test_rates_come_back_as_they_are(full: Profile) -> None:
    """The bench answers by the model, so the model's own rates must come out of the arithmetic."""
    rates, known = Rates(full), Rates(H200)
    assert (full.machine, full.commit) == (H200.machine, "abc")
    assert full.links["peer"].to_gpu_bytes_per_s == 396e9
    for home in ("peer", "host"):
        reads = {(r.ctas, r.slices): r.bytes_per_s for r in full.links[home].reads}
        assert {ctas for ctas, slices in reads if slices == 1} == {*READ_CTAS, 132}
        assert {slices for ctas, slices in reads if ctas == 16} == set(range(1, 8))
        # Fixed costs of a launch are in what is measured: a little under what the link gives.
        assert reads[132, 1] == pytest.approx(known.read_bytes_per_s(home, 132, 1), rel=0.05)
        assert reads[16, 7] == pytest.approx(known.read_bytes_per_s(home, 16, 7), rel=0.05)
    assert {(r.m, r.sms) for r in full.matmul_flops} == {
        (m, sms) for m in MATMUL_ROWS for sms in (132, 64, 16)
    }
    assert rates.matmul_s(2048, 16384, 4096, 132) == pytest.approx(372e-6, rel=0.05)
    assert {rate.sms for rate in full.hbm} == {132, 64, 16}


def test_it_is_saved_and_found_again(full: Profile, tmp_path: Path) -> None:
    path = save_profile(full, tmp_path / "profile.json")
    assert load_profile(path) == full
    assert load_profile(path).cut == full.cut


def test_the_profile_is_good_for_picking(full: Profile) -> None:
    """Linears of models in between the measured ones are picked at what the truth would pick."""
    chooser, truth = Chooser(full), Chooser(H200)
    for m in (1, 4, 100, 700, 3000):
        for n, k in ((14336, 4096), (5120, 5120)):
            for home in ("peer", "host"):
                question = Question(m, n, k, "bfloat16", home, 132)
                taken = {(e.dataflow, e.tiles): e.predicted_s for e in truth.estimates(question)}
                pick = chooser.pick(question)
                assert taken[pick.dataflow, pick.tiles] <= 1.2 * min(taken.values())


def test_every_dataflow_is_tried_from_every_home(full: Profile) -> None:
    """What was never timed is never picked."""
    tried = {(point.home, point.dataflow) for point in full.points}
    for home in ("peer", "host"):
        assert {flow for where, flow in tried if where == home} == {
            "prefetch", "direct", "split", "tee", "ring", "grouped", *PUBLISHED,
        }  # fmt: skip


def test_slices_alone_and_in_company(full: Profile) -> None:
    contexts = Counter((point.sms, point.neighbours) for point in full.points)
    assert {(132, 0), (16, 0), (16, 6), (64, 0), (16, 1)} <= set(contexts)


def test_a_machine_of_one_gpu_has_no_peer() -> None:
    found = run(FakeBench(homes=("host",)), QUICK_S)
    assert set(found.links) == {"host"}
    assert {point.home for point in found.points} == {"host", "hbm"}


@pytest.mark.parametrize(
    ("sms", "slices", "contexts"),
    [
        ((132,), 1, {(132, 0)}),
        ((24, 16), 1, {(24, 0), (16, 0)}),
        ((60, 16), 3, {(60, 0), (16, 0), (16, 2), (16, 1)}),
        ((32, 16), 2, {(32, 0), (16, 0), (16, 1)}),
    ],
)
def test_only_slices_there_are_are_asked_for(
    sms: tuple[int, ...], slices: int, contexts: set[tuple[int, int]]
) -> None:
    bench = FakeBench(("host",), sms, slices, notes=["slices: the driver said no"])
    found = run(bench)
    assert {(point.sms, point.neighbours) for point in found.points} == contexts
    assert max(question.neighbours for question, *_ in bench.asked) == slices - 1
    assert found.cut == ("slices: the driver said no",)


# Order and time


@pytest.mark.parametrize("budget_s", [QUICK_S, FULL_S])
@pytest.mark.parametrize("overhead_s", [0.02, 0.1, 0.3])
def test_it_ends_in_time(budget_s: float, overhead_s: float) -> None:
    bench = FakeBench(overhead_s=overhead_s)
    began_s = bench.now_s
    found = run(bench, budget_s)
    assert bench.now_s <= began_s + budget_s + 1
    assert found.points
    assert found.cut


def test_a_machine_ten_times_slower_than_believed_ends_in_time_too() -> None:
    bench = FakeBench(truth=lambda q, d, t: 10.0)
    began_s = bench.now_s
    run(bench, FULL_S)
    assert bench.now_s <= began_s + FULL_S + 5


def test_what_is_cut_is_said(quick: Profile, endless: Profile) -> None:
    assert len(quick.points) < len(endless.points)
    assert any(
        line.startswith("experts: 36 of 36 measurements, for lack of time") for line in quick.cut
    )
    assert not any("experts:" in line for line in endless.cut)


def test_with_no_time_at_all_there_are_rates() -> None:
    found = run(FakeBench(), 0.0)
    assert found.points == ()
    assert found.links["peer"].reads
    assert found.matmul_flops
    assert found.cut[0].startswith("whole GPU: ")
    assert Chooser(found).pick(Question(64, 4096, 4096, "bfloat16", "host", 132)).predicted_s > 0


def test_what_was_measured_in_less_time_is_measured_in_more(quick: Profile, full: Profile) -> None:
    """More time only adds: the order does not depend on the budget."""
    keys = [
        [(p.dataflow, p.tiles, p.m, p.n, p.home, p.sms) for p in f.points] for f in (quick, full)
    ]
    whole = sum(point.sms == 132 for point in quick.points)
    assert keys[0][:whole] == keys[1][:whole]


def test_nothing_is_measured_twice(endless: Profile) -> None:
    points = endless.points
    keys = [(p.dataflow, p.tiles, p.m, p.n, p.k, p.home, p.sms, p.neighbours) for p in points]
    assert len(set(keys)) == len(keys)


def test_the_best_of_every_question_comes_first() -> None:
    chooser = Chooser(H200)
    part = Part("x", 132, ROWS, ((4096, 4096),), within=3.0)
    tasks = plan(part, ("peer", "host"), chooser)
    questions = list(dict.fromkeys(task.question for task in tasks))
    assert len(questions) == 2 * len(ROWS)
    for task, question in zip(tasks, questions, strict=False):
        best = chooser.estimates(question)[0]
        assert best.dataflow in PUBLISHED or (task.dataflow, task.tiles) == (
            best.dataflow,
            best.tiles,
        )
    first = [task.dataflow for task in tasks if task.question == questions[0]]
    best_of_each = list(dict.fromkeys(first))
    assert first[: len(best_of_each)] == best_of_each, "every dataflow before any's second tiles"


def test_hopeless_candidates_are_left_out() -> None:
    chooser = Chooser(H200)
    for part in parts(FakeBench()):
        for task in plan(part, ("peer",), chooser):
            mine = [
                estimate.predicted_s
                for estimate in chooser.estimates(task.question)
                if (estimate.dataflow in PUBLISHED) == part.published
            ]
            assert part.published or task.expected_s <= part.within * min(mine)


def test_later_parts_believe_what_earlier_ones_measured(endless: Profile) -> None:
    """Rings are ten times slower than the model has it here: after the first part nobody asks."""

    def truth(question: Question, dataflow: DataflowName, tiles: Tiles) -> float:
        return 10.0 if dataflow == "ring" else 1.0

    found = run(FakeBench(truth=truth))
    rings = Counter(point.sms for point in found.points if point.dataflow == "ring")
    usual = Counter(point.sms for point in endless.points if point.dataflow == "ring")
    assert 0 < rings[132] < usual[132] / 2
    assert rings[64] < usual[64] / 2


# Refusals


def test_what_is_refused_is_said_once_and_the_rest_goes_on() -> None:
    def refuses(question: Question, dataflow: DataflowName) -> str:
        return "no room" if dataflow == "ring" and question.sms == 16 else ""

    found = run(FakeBench(refuses=refuses))
    assert not [p for p in found.points if p.dataflow == "ring" and p.sms == 16]
    assert [p for p in found.points if p.dataflow == "ring" and p.sms == 132]
    said = [line for line in found.cut if "no room" in line]
    assert said
    assert len(set(said)) == len(said)
    assert all(line.startswith("ring (bx ") and " on 16 SMs: no room" in line for line in said)


def test_slices_that_can_not_be_kept_busy_are_left_out() -> None:
    found = run(FakeBench(refuses=lambda q, d: "too slow" if q.neighbours > 2 else ""), QUICK_S)
    assert {read.slices for read in found.links["peer"].reads} == {1, 2, 3}
    assert "4 slices that read from peer at once: too slow" in found.cut


def test_a_gpu_that_can_not_even_read_is_an_error() -> None:
    with pytest.raises(Refused, match="broken"):
        run(FakeBench(refuses=lambda q, d: "broken"))


# Tasks


@pytest.mark.parametrize(
    ("expected_s", "length"), [(1e-5, 16), (1e-3, 16), (2.5e-3, 10), (5e-3, 5), (1.0, 4)]
)
def test_chains_are_as_long_as_they_are_short(expected_s: float, length: int) -> None:
    assert chain_length(expected_s, "prefetch") == length
    assert chain_length(1.0, "asym") == 2


def test_costs_grow_with_what_is_run() -> None:
    alone = Question(64, 4096, 4096, "bfloat16", "host", 16)
    beside = Question(64, 4096, 4096, "bfloat16", "host", 16, neighbours=6)
    costs = [Task(q, "direct", Tiles(), s).cost_s for s in (1e-4, 1e-2) for q in (alone, beside)]
    assert costs == sorted(costs)
    assert costs[0] < 0.1


def test_points_keep_what_was_asked_and_what_it_took(full: Profile) -> None:
    for point in full.points:
        question = Question(
            point.m, point.n, point.k, point.dtype, point.home, point.sms, point.experts,
            point.top_k, point.neighbours,
        )  # fmt: skip
        assert point.seconds == modelled(RATES, question, point.dataflow, point.tiles).seconds
