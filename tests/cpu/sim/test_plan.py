"""Planning: what fits, what binds, and that more of what binds is what helps."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from c2cserve.cli.main import app
from c2cserve.serving.catalog_shapes import find_models
from c2cserve.sim.planning.bottleneck import RESOURCES, faster_gpus
from c2cserve.sim.planning.estimates import Estimates
from c2cserve.sim.planning.plan import Planner, grown
from c2cserve.sim.planning.result import Dedicated, Plan, Wishes
from c2cserve.sim.planning.search import Search
from c2cserve.sim.planning.show import answer
from c2cserve.sim.planning.timeline import Here
from c2cserve.sim.planning.trials import Trials, half_interval
from c2cserve.sim.run import Scenario
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.workload.growing import GrowingLoad
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.shapes import catalogue

SPECIALISTS = Path(__file__).parents[3] / "examples" / "specialists" / "catalog.toml"
STEADY = "synthetic:rate=16,duration=8,sources=16,zipf=0,prompt=300,output=40"


def planner(
    trace: str, catalog: str, slo: str = "1,0.1", kv_share: float = 0.5, policy: str = "c2cserve"
) -> Planner:
    slices = SliceSettings(kv_share)
    scenario = Scenario(
        "", catalog, WorkloadSettings(trace), slo, policy=policy, slices=slices, noise=0.0
    )
    return Planner(scenario, catalogue(catalog), 0.95, lambda what, done, left: None)


def largest(trace: str, hardware: str, slo: str = "1,0.1") -> Plan:
    return planner(trace, "llama-3.1-8b*4", slo).largest_catalogue(hardware, 64)


def test_the_largest_catalogue_is_where_trials_begin_to_fail() -> None:
    plan = largest(STEADY, "gh200")
    assert plan.best is not None
    assert plan.beyond is not None
    assert plan.grows
    assert plan.best.attainment >= 0.95 > plan.beyond.attainment
    assert 0 < plan.beyond.models - plan.best.models <= max(1, 0.02 * plan.best.models)
    assert len({trial.models for trial in plan.trials}) == len(plan.trials)
    use = plan.beyond.use
    assert use.compute + use.bandwidth + use.waiting == pytest.approx(use.busy, abs=1e-3)


def test_a_slow_link_binds_and_a_faster_machine_serves_more() -> None:
    """All weights stream in every step."""
    slow, fast = (
        planner(STEADY, "llama-3.2-3b*4", kv_share=1.0, policy="c2cserve-static").largest_catalogue(
            hardware, 64
        )
        for hardware in ("h200-x1", "gh200-144")
    )
    assert slow.binds == fast.binds == "link"
    assert fast.best is not None
    assert fast.best.models > (slow.best.models if slow.best else 0)
    assert slow.beyond is not None
    assert slow.beyond.use.waiting > 0.5
    assert slow.beyond.use.link > 0.5


def test_long_prompts_bind_compute() -> None:
    trace = "synthetic:rate=3,duration=20,sources=1,zipf=0,prompt=12000,output=2"
    plan = planner(trace, "llama-3.2-1b", "1,1").largest_catalogue("gh200:mig7", 64)
    assert plan.best is None
    assert plan.binds == "compute"


def test_the_smallest_machine_is_the_first_that_is_enough() -> None:
    one = planner(STEADY, "llama-3.2-3b*5", kv_share=1.0, policy="c2cserve-static")
    plan = one.smallest_machine(["h200-x1", "gh200-144", "gb200"])
    assert [trial.passed for trial in plan.trials] == [False, True]
    assert plan.best is not None
    assert plan.best.hardware == "gh200-144"
    assert plan.beyond is plan.trials[0]


def test_loads_of_whole_models_count_as_use_of_the_link() -> None:
    """16 models of 16 GB take turns on one H200, and no step waits for the link."""
    one = planner("synthetic:rate=4,duration=20,sources=16,zipf=0,output=9", "llama-3.1-8b*16")
    [trial] = one.smallest_machine(["h200-x1"]).trials
    assert trial.use.waiting == 0.0
    assert trial.use.link > 0.1


def test_all_seeds_confirm_the_answer_and_name_the_models_that_miss() -> None:
    base = Scenario("", "", WorkloadSettings(STEADY.replace("zipf=0", "zipf=1")), "1,0.02")
    heard: list[tuple[int, float]] = []
    one = Planner(
        base, catalogue("llama-3.1-8b*4"), 0.9,
        lambda what, done, left: heard.append((done, left.about_s)),
        Wishes(seeds=3, layouts=True, spare=True, gpu_month=100.0), clock=lambda: 0.0,
    )  # fmt: skip
    plan = one.largest_catalogue("h200-x2", 8)
    assert plan.best is not None
    assert plan.best.seeds == 3
    assert plan.beyond is None or plan.beyond.seeds == 3
    assert [trial.hardware for trial in plan.layouts] == [
        "h200-x2:green2", "h200-x2:green4", "h200-x2:green7",
    ]  # fmt: skip
    assert plan.spare is not None
    assert plan.spare.attainment <= plan.best.attainment
    assert plan.dedicated == Dedicated(plan.best.models, 2, 100.0 * plan.best.models, 200.0)
    for trial in plan.trials:
        assert all(miss.attainment < 0.9 for miss in trial.misses)
        assert trial.passed or trial.misses
    assert [done for done, _ in heard] == list(range(1, len(heard) + 1))
    assert heard[-1][1] == 0.0
    assert all(left_s > 0.0 for _, left_s in heard[:-1]), "the first simulation tells of the others"
    said = "\n".join(answer(plan, 0.9))
    assert "With GPUs of their own" in said
    assert "With one GPU less" in said


def test_seeds_side_by_side_give_what_they_give_one_by_one() -> None:
    base = Scenario("", "", WorkloadSettings(STEADY), "1,0.1")
    models = catalogue("llama-3.1-8b*4")
    with ThreadPoolExecutor(3) as pool:
        trials = [
            Trials(base, 0.95, 3, executor, lambda what, job, done: None).run("gh200", models)
            for executor in (Here(), pool)
        ]
    assert trials[0] == trials[1]


def test_a_trial_that_cannot_pass_any_more_ends_early() -> None:
    """It fails with and without that. Its later requests do not come."""
    base = Scenario("", "", WorkloadSettings(STEADY), "0.0001,0.0001")
    models = catalogue("llama-3.1-8b*4")
    [whole, cut] = [
        Trials(base, 0.5, 3, Here(), lambda what, job, done: None).run(
            "gh200", models, seeds=1, cut=each
        )
        for each in (False, True)
    ]
    assert not whole.cut
    assert cut.cut
    assert not whole.passed
    assert not cut.passed
    assert cut.requests < 0.8 * whole.requests
    trials = Trials(base, 0.5, 3, Here(), lambda what, job, done: None)
    assert trials.run("gh200", models, enough=lambda seed, share: seed == 1).seeds == 2


def test_a_trial_that_passes_is_never_cut() -> None:
    base = Scenario("", "", WorkloadSettings(STEADY), "1,0.1")
    trials = Trials(base, 0.95, 2, Here(), lambda what, job, done: None)
    models = catalogue("llama-3.1-8b*4")
    whole, cut = (trials.run("gh200", models, seeds=1, cut=each) for each in (False, True))
    assert whole.passed
    assert whole == cut


@pytest.mark.parametrize("knee", [1, 5, 37, 64, 65, 100, 127, 500])
def test_a_search_finds_where_trials_begin_to_fail(knee: int) -> None:
    """All up to `knee` models are in time, and each one more costs a percent."""
    search, tried = Search(0.95, 1000), list[int]()

    def attempt(count: int, *, complete: bool) -> bool:
        attainment = min(1.0, 0.95 + 0.01 * (knee - count))
        tried.append(count)
        search.note(count, attainment, passed=count <= knee, complete=complete)
        return count <= knee

    count = 64
    while True:
        passed = attempt(count, complete=False)
        if (search.passed and search.failed) or (not passed and count == 1):
            break
        count = 2 * count if passed else count // 2
    alone = len(tried)
    while (following := search.next()) is not None:
        attempt(following, complete=True)
    assert search.passed <= knee < search.failed
    assert search.failed - search.passed <= max(1, int(0.02 * search.passed))
    assert len(tried) - alone <= 8


def test_no_simulation_runs_twice() -> None:
    """One that was begun in advance, or had by another trial, is not run again. One that was cut
    short is not a whole one."""
    base = Scenario("", "", WorkloadSettings(STEADY), "1,0.1")
    models = catalogue("llama-3.1-8b*4")
    ran: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        trials = Trials(
            base, 0.95, 3, pool, lambda what, job, done: ran.append(job.scenario.seed), width=2
        )
        trials.begin("gh200", models, seeds=1, cut=True)
        one = trials.run("gh200", models, seeds=1, cut=True)
        assert ran == [0]
        several = trials.run("gh200", models)
    assert ran == [0, 1, 2]
    assert several.shares[:1] == one.shares


def test_a_search_goes_back_to_what_it_knows() -> None:
    """All seeds refute an end: its neighbours are those that were tried before."""
    search = Search(0.95, 1000)
    for models, share in ((64, 1.0), (128, 0.9), (90, 0.955), (95, 0.94)):
        search.note(models, share, passed=share >= 0.95, complete=False)
    assert (search.passed, search.failed) == (90, 95)
    search.note(90, 0.945, passed=False, complete=True)
    assert (search.passed, search.failed) == (64, 90)
    search.note(89, 0.948, passed=False, complete=False)
    search.note(89, 0.951, passed=True, complete=True)
    assert (search.passed, search.failed) == (89, 90)


def test_what_is_known_by_now_moves_an_end() -> None:
    """The first seed is above the mean of all. An end that passed by it alone fails."""
    search = Search(0.95, 1000)
    for models, share in ((24, 0.98), (48, 0.74), (34, 0.97)):
        search.note(models, share, passed=share >= 0.95, complete=False)
    search.note(36, 0.92, passed=False, complete=True)
    assert (search.passed, search.failed) == (34, 36)
    search.revise({24: 0.953, 34: 0.943, 36: 0.92})
    assert (search.passed, search.failed) == (24, 34)
    assert search.next() == 27


def test_the_middle_is_tried_where_much_room_is_left() -> None:
    for share, middle in ((1.0, 91), (0.98, 0)):
        search = Search(0.95, 1000)
        search.note(64, share, passed=True, complete=False)
        search.note(128, 0.78, passed=False, complete=False)
        assert search.middle == middle


def test_a_few_seeds_say_as_much_as_all_beside_a_catalogue_that_all_have_simulated() -> None:
    """Seeds differ by five points, catalogues by one. So two seeds say what five would."""
    effects = (0.02, 0.03, 0.01, -0.04, -0.02)
    some = Estimates(5)
    for seed, effect in enumerate(effects):
        assert not some.surely(30, 0.95)
        some.note(30, seed, 0.94 + effect)
    assert some.surely(30, 0.95)
    assert some.expected(30) == pytest.approx(0.94)
    for models, share in ((28, 0.947), (26, 0.953)):
        for seed, effect in enumerate(effects):
            some.note(models, seed, share + effect + (0.001 if seed % 2 else -0.001))
    some.note(20, 0, 0.97 + effects[0])
    assert some.expected(20) == pytest.approx(0.97, abs=0.002)
    assert some.surely(20, 0.95)
    some.note(27, 0, 0.9501 + effects[0])
    assert not some.surely(27, 0.95)


def test_the_first_catalogue_is_compared_with_by_all_of_its_seeds() -> None:
    """One that is far from what was asked for is none to compare others with."""
    some = Estimates(5)
    for seed in range(4):
        some.note(30, seed, 0.94)
        some.note(60, seed, 0.6)
    assert not some.surely(30, 0.95)
    assert some.surely(60, 0.95)


def test_a_pass_beyond_a_failure_is_believed() -> None:
    """The failure was that of one seed; the pass is of all."""
    search = Search(0.95, 100)
    search.note(8, 1.0, passed=True, complete=False)
    search.note(16, 0.94, passed=False, complete=False)
    search.note(16, 0.96, passed=True, complete=True)
    assert (search.passed, search.failed) == (16, 20)


def test_the_interval_is_students() -> None:
    assert half_interval([0.9]) == 0.0
    assert half_interval([0.9, 0.9, 0.9]) == 0.0
    spread = [0.90, 0.92, 0.94, 0.96, 0.98]
    assert half_interval(spread) == pytest.approx(2.776 * 0.031623 / 5**0.5, rel=1e-3)


def test_nothing_is_enough_for_targets_that_no_machine_meets() -> None:
    plan = largest(STEADY, "gh200", "0.0001,0.0001")
    assert plan.best is None
    assert [trial.models for trial in plan.trials] == [4, 2, 1]
    assert not plan.binds


def test_load_grows_with_the_catalogue() -> None:
    load = GrowingLoad(WorkloadSettings(STEADY))
    counts = [len(load.of(grown(catalogue("llama-2-7b"), count))) for count in (4, 16, 32)]
    assert counts[0] < counts[1]
    assert counts[2] == 2 * counts[1]
    twice = load.of(grown(catalogue("llama-2-7b"), 32))
    assert [r.arrival_s for r in twice] == sorted(r.arrival_s for r in twice)
    assert max(r.arrival_s for r in twice) <= 40


def test_load_of_a_trace_that_names_no_models_is_spread() -> None:
    load = GrowingLoad(WorkloadSettings("azure-conv", limit=300))
    assert not load.grows
    few, many = (load.of(grown(catalogue("llama-2-7b"), count)) for count in (2, 50))
    assert len(few) == len(many) == 300
    assert len({request.model for request in many}) > 10


def test_copies_are_models_of_their_own() -> None:
    models = grown(catalogue("llama-2-7b*2"), 5)
    assert len({model.spec.id for model in models}) == 5


def test_reliefs_give_more_of_one_thing() -> None:
    machine = build("a100x4+xeon6462cx4")
    simulated = machine.slices[0]
    table = machine.hardware.tables.get("llama-2-7b", simulated.table)
    assert table is not None
    for name, enlarge in RESOURCES.items():
        more = enlarge(machine, 2.0)
        other = more.slices[0]
        faster = more.hardware.tables.get("llama-2-7b", simulated.table)
        assert faster is not None
        assert (other.flops == 2 * simulated.flops) == (name == "compute")
        assert (other.hbm_bytes_per_s == 2 * simulated.hbm_bytes_per_s) == (name == "HBM bandwidth")
        assert (other.slice.kv_bytes > simulated.slice.kv_bytes) == (name == "HBM")
        assert (more.links == machine.links) == (name != "link")
        assert (more.hardware.pool_bytes > machine.hardware.pool_bytes) == (name == "host memory")
        assert (faster.prefill_s(0, 512) < table.prefill_s(0, 512)) == (name == "compute")
        assert (faster.decode_s(4, 512) < table.decode_s(4, 512)) == (name == "HBM bandwidth")


def test_a_faster_link_loads_weights_faster_where_it_alone_limits_them() -> None:
    machine = build("h200-x1")
    [one, *_] = [each for each in machine.slices if each.h2d]
    rate = dict(machine.links)[one.h2d[0]]
    for load, expected in ((rate, 2 * rate), (rate / 4, rate / 4)):
        slow = replace(machine, slices=(replace(one, load_bytes_per_s=load),))
        [faster] = RESOURCES["link"](slow, 2.0).slices
        assert faster.load_bytes_per_s == expected
        assert faster.slice.link_bytes_per_s == 2 * one.slice.link_bytes_per_s


def test_faster_gpus_take_less_time_for_every_step_and_cpus_the_same() -> None:
    machine = build("a100x4+xeon6462cx4")
    faster = faster_gpus(machine, 2.0)
    for one, other in zip(machine.slices, faster.slices, strict=True):
        share = 2.0 if one.h2d else 1.0
        assert other.flops == share * one.flops
        assert other.step_s == one.step_s / share
        table, less = (
            each.hardware.tables.get("llama-2-7b", one.table) for each in (machine, faster)
        )
        assert table is not None
        assert less is not None
        assert less.decode_s(4, 512) == pytest.approx(table.decode_s(4, 512) / share)
        assert less.prefill_s(0, 512) == pytest.approx(table.prefill_s(0, 512) / share)
    assert faster.links == machine.links


def test_a_servers_own_catalogue_has_its_sizes_and_targets() -> None:
    models = {model.spec.id: model for model in find_models(str(SPECIALISTS))}
    assert set(models) == {"sorter-llama", "adder-qwen", "reverser-moe", "chatter-qwen2"}
    assert models["reverser-moe"].spec.experts > 1
    for model in models.values():
        assert model.spec.slo.ttft_s == 0.5
        assert model.spec.kv_block_bytes == model.shape.kv_token_bytes * 16
        assert model.spec.step_bytes(1) <= model.spec.weight_bytes


def test_the_command_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with pytest.raises(SystemExit) as ended:
        app([
            "plan", "--hardware", "gh200", "--catalog", str(SPECIALISTS), "--limit", "40",
            "--trace", "azure-conv", "--most", "8", "--seeds", "2", "--jobs", "1",
            "--json", str(out),
        ])  # fmt: skip
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "gh200 serves" in said
    written = json.loads(out.read_text())
    assert written["best"]["attainment"] >= 0.95
    assert not written["grows"]
    assert [(t["models"], t["seeds"]) for t in written["trials"]] == [(4, 1), (8, 2)]
    assert written["beyond"] is None
