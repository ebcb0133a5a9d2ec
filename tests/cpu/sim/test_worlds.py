"""Whatever happens, invariants hold: they are asserted by the world itself at every step."""

import pytest
from example_counts import examples, few
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import check_end, crowded, world

from c2cserve.policy.baselines.presets import AEGAEON_HYBRID, PRESETS
from c2cserve.sim.report import report
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.build import WorkloadSettings, workload
from c2cserve.sim.world.faults import SliceFault
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Simulation


@pytest.mark.parametrize("seed", range(few(50, 30)))
def test_random_worlds_keep_their_invariants(seed: int) -> None:
    simulation = world(seed)
    simulation.run()
    check_end(simulation)


@pytest.mark.parametrize("seed", [57, 606])
def test_a_preset_that_streams_takes_models_that_are_larger_than_a_slice(seed: int) -> None:
    """They waited for ever for a slice that holds all of their weights."""
    simulation = world(seed)
    assert simulation.settings.preset == AEGAEON_HYBRID
    simulation.run()
    check_end(simulation)


def test_a_request_that_was_refused_while_it_ran_is_not_placed_again_after_a_fault() -> None:
    """Its slice had not removed it yet when the slice was lost."""
    simulation = world(381)
    simulation.run()
    check_end(simulation)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@given(st.integers(0, 10**9))
@settings(max_examples=examples(1000), deadline=None)
def test_a_thousand_random_worlds_keep_their_invariants(seed: int) -> None:
    simulation = world(seed)
    simulation.run()
    check_end(simulation)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_equal_seeds_give_equal_runs(preset: str) -> None:
    reports = []
    for _ in range(2):
        simulation = world(7, preset)
        simulation.run()
        check_end(simulation)
        reports.append(report(simulation).as_json())
    assert reports[0] == reports[1]


def test_other_seeds_give_other_runs() -> None:
    ends = set()
    for seed in range(3):
        simulation = world(seed)
        simulation.run()
        ends.add(simulation.timeline.now)
    assert len(ends) == 3


def test_who_is_never_refused_is_served_however_late() -> None:
    """A slice with nothing else to do serves them, in time or not: no other request comes."""
    models = catalogue("llama-2-7b*3")
    asked = [SimRequest(0.01 * i, model.spec.id, 500, 20) for i, model in enumerate(models)]

    def endings(patience: float, *faults: SliceFault) -> list[tuple[str, int]]:
        scenario = Scenario(
            "h200-x1", "", WorkloadSettings(""), "0.1,0.01", patience=patience, faults=faults
        )
        simulation = prepare(scenario, models, asked)
        simulation.run()
        ended = sorted(simulation.requests.ended, key=lambda tracked: tracked.request.id)
        return [(tracked.ending, tracked.status) for tracked in ended]

    assert endings(0.0) == [("finished", 0)] * 3
    # The first was on the slice when it was lost; the others came later.
    lost = endings(20.0, SliceFault("gpu0", 0.005, 20.0))
    assert lost == [("finished", 0), ("rejected", 429), ("rejected", 429)]


@pytest.mark.parametrize(("rate", "seconds", "models", "seed"), [(8, 10, 3, 0), (20, 10, 4, 1)])
def test_short_of_kv_beside_kept_weights_everybody_ends(
    rate: int, seconds: int, models: int, seed: int
) -> None:
    """Who holds KV without his weights, and who has weights and finds no KV, never wait for each
    other; and weights do not leave for KV that gains nothing by it."""
    names = catalogue(f"llama-3.2-3b*{models}")
    load = f"synthetic:rate={rate},duration={seconds},sources={models},prompt=1000,output=150"
    asked = workload(WorkloadSettings(load, seed=seed), names)
    slices = SliceSettings(kv_share=0.02)
    scenario = Scenario(
        "gh200:mig3", "", WorkloadSettings(""), "1,0.1", patience=1.0, slices=slices, seed=seed
    )
    simulation = prepare(scenario, names, asked)
    simulation.run()
    check_end(simulation)


@pytest.mark.parametrize("seed", [1, 8, 17])
def test_a_step_of_a_model_that_was_preempted_finds_its_weights(seed: int) -> None:
    """It is in line behind another model's when SLINFER takes the model's requests away."""
    simulation = crowded(seed)
    simulation.run()
    check_end(simulation)


def simulated(policy: str, output: int, hardware: str = "h200-x1") -> Simulation:
    """30 requests for nine models of 8B, of which eight fit."""
    models = catalogue("llama-3.1-8b*9")
    asked = [SimRequest(0.05 * i, models[i % 9].spec.id, 500, output) for i in range(30)]
    scenario = Scenario(hardware, "", WorkloadSettings(""), "2,0.2", policy, noise=0.0)
    simulation = prepare(scenario, models, asked)
    simulation.run()
    check_end(simulation)
    return simulation


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_no_policy_is_told_how_long_an_answer_is(policy: str) -> None:
    limits = [
        {t.request.max_new_tokens for t in simulated(policy, output).requests.ended}
        for output in (3, few(400, 100))
    ]
    assert limits[0] == limits[1]
    assert len(limits[0]) == 1


@pytest.mark.parametrize("policy", sorted(name for name, one in PRESETS.items() if not one.streams))
def test_systems_that_load_weights_never_stream(policy: str) -> None:
    for seed in range(few(20, 3)):
        simulation = world(seed, policy)
        simulation.run()
        use = report(simulation).nodes.values()
        assert sum(node.streamed_bytes for node in use) == 0.0


def test_slinfer_knows_every_token_before_each_decision() -> None:
    """Also those of decodes that are simulated as one event."""
    told: list[bool] = []
    models = catalogue("llama-3.1-8b")
    asked = [SimRequest(0.3 * i, models[0].spec.id, 500, 60) for i in range(4)]
    scenario = Scenario("h200-x1", "", WorkloadSettings(""), "2,0.2", "slinfer", noise=0.0)
    simulation = prepare(scenario, models, asked)
    decide = simulation.loop.policy.decide

    def decided(now: float) -> object:
        for load in simulation.loop.policy._slices.values():  # pyright: ignore
            here = dict(simulation.slices[load.slice.id].tokens_sent())
            for one in load.active.values():
                told.extend(job.out == here.get(name, 0) for name, job in one.jobs.items())
        return decide(now)

    simulation.loop.policy.decide = decided  # pyright: ignore
    simulation.run()
    assert len(told) > 4
    assert all(told)


@pytest.mark.parametrize("policy", sorted(PRESETS))
@pytest.mark.parametrize("hardware", ["h200-x1", "gh200", "a100x4+xeon6462cx4"])
def test_every_policy_loads_weights_at_the_links_speed(policy: str, hardware: str) -> None:
    machine = build(hardware, None, PRESETS[policy])
    rates = dict(machine.links)
    for one in machine.slices:
        if one.h2d:
            assert one.load_bytes_per_s == rates[one.h2d[0]]


@pytest.mark.parametrize("policy", ["serverlessllm", "slinfer"])
def test_memory_without_kv_is_resized_in_no_time(policy: str) -> None:
    """The first token comes after the load and its step."""
    models = catalogue("llama-3.1-8b")
    asked = [SimRequest(0.0, models[0].spec.id, 16, 2)]
    scenario = Scenario("gh200", "", WorkloadSettings(""), "9,1", policy, noise=0.0)
    simulation = prepare(scenario, models, asked)
    simulation.run()
    [one] = simulation.machine.slices
    load_s = models[0].spec.weight_bytes / one.load_bytes_per_s
    assert simulation.requests.ended[0].ttft_s == pytest.approx(load_s, abs=0.02)


def test_a_request_may_be_refused_while_its_last_step_runs() -> None:
    """The slice learns of it too late, and what it computed is for no client. Some of these seeds
    have such requests."""
    names = interleaved(catalogue("llama-3.2-3b*12"))
    for seed in range(8):
        load = "synthetic:rate=80,duration=4,sources=12,prompt=1000,output=1"
        asked = workload(WorkloadSettings(load, seed=seed), names)
        scenario = Scenario(
            "gh200:mig3", "", WorkloadSettings(""), "1,0.1", patience=5.0,
            slices=SliceSettings(kv_share=0.5), seed=seed,
        )  # fmt: skip
        simulation = prepare(scenario, names, asked)
        simulation.run()
        check_end(simulation)
