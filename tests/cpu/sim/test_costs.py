"""Costs against arithmetic by hand."""

from dataclasses import replace

import pytest

from c2cserve.core.step import SeqStep, Step
from c2cserve.sim.world.costs import Costs
from c2cserve.sim.world.hardware import SimulatedSlice, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import SimModel, catalogue, shape_of
from c2cserve.sim.world.simulation import Settings, Simulation
from c2cserve.sim.world.tables import Tables, interpolate, linear_bytes, read_tables

MEASURED = build("h200-x1").slices[0]
GPU = replace(MEASURED, kernels=None)


def model(name: str) -> SimModel:
    return SimModel(shape_of(name).spec(name), shape_of(name))


def step(*parts: tuple[int, int]) -> Step:
    return Step(
        1, "m", tuple(SeqStep(f"r{i}", s, n, (), s == 0, True) for i, (s, n) in enumerate(parts))
    )


def test_a_long_prefill_is_bound_by_compute() -> None:
    shape = shape_of("llama-3.1-8b")
    cost = Costs(Tables({})).step(step((0, 4096)), model("llama-3.1-8b"), GPU, 1.0)
    flops = 2 * shape.parameters * 4096 + 4 * 32 * 4096 * (4096 * 4097 / 2)
    assert cost.floor_s == pytest.approx(flops / GPU.flops + GPU.step_s, rel=1e-3)
    assert cost.link_bytes == 0.0


def test_a_decode_is_bound_by_weights_and_kv_in_memory() -> None:
    shape = shape_of("llama-3.1-8b")
    cost = Costs(Tables({})).step(step(*[(1000, 1)] * 8), model("llama-3.1-8b"), GPU, 1.0)
    activations = 24 * 32 * 4096 * 8
    read = shape.weight_bytes + 8 * 1002 * shape.kv_token_bytes + activations
    assert cost.floor_s == pytest.approx(read / GPU.hbm_bytes_per_s + GPU.step_s, rel=1e-6)


def test_weights_that_are_not_kept_come_over_the_link_once() -> None:
    llama = model("llama-3.1-8b")
    costs = Costs(Tables({}))
    assert costs.step(step((0, 4096)), llama, GPU, 0.0).link_bytes == llama.spec.weight_bytes
    half = costs.step(step((9, 1)), llama, GPU, 0.5).link_bytes
    assert half == llama.spec.weight_bytes / 2


def test_hybrid_gemms_trade_the_link_for_memory() -> None:
    llama = model("llama-3.1-8b")
    costs = Costs(Tables({}))
    stationary = costs.step(step((0, 1024)), llama, GPU, 0.0, alpha=0.0)
    symmetric = costs.step(step((0, 1024)), llama, GPU, 0.0, alpha=1.0)
    assert stationary.link_bytes == llama.spec.weight_bytes
    assert symmetric.link_bytes == pytest.approx(8 * llama.spec.weight_bytes)
    partial = 4 * 1024 * llama.shape.parameters / 128
    assert stationary.memory_bytes - symmetric.memory_bytes == pytest.approx(partial)


def test_a_mixture_reads_the_experts_its_tokens_choose() -> None:
    spec = model("qwen3-30b-a3b").spec
    rest = spec.weight_bytes - spec.experts * spec.expert_bytes
    assert spec.step_bytes(1) == pytest.approx(rest + 8 * spec.expert_bytes)
    assert spec.step_bytes(10_000) == pytest.approx(spec.weight_bytes)
    active = shape_of("qwen3-30b-a3b").active_parameters
    assert 3.0e9 < active < 3.6e9


RAW = {
    "models": {
        "m": {
            "d": {
                "prefill_ms": [[1, 20], [100, 30], [200, 50]],
                "decode_ms": {"512": [[1, 20], [4, 26]], "1024": [[1, 22], [4, 34]]},
            }
        }
    }
}


def test_tables_answer_with_what_was_measured_and_lines_between() -> None:
    table = read_tables(RAW).get("m", "d")
    assert table is not None
    assert table.prefill_s(0, 100) == pytest.approx(0.030)
    assert table.prefill_s(0, 150) == pytest.approx(0.040)
    assert table.prefill_s(0, 300) == pytest.approx(0.070)  # the last line goes on
    assert table.prefill_s(100, 100) == pytest.approx(0.030)  # no less than 100 tokens alone
    assert table.decode_s(4, 528) == pytest.approx(0.026 + 0.008 * 16 / 512, rel=1e-3)
    assert table.decode_s(2, 100) == pytest.approx(0.022)
    assert read_tables(RAW).get("m", "other") is None


def test_interpolation_before_the_first_and_of_one_point() -> None:
    assert interpolate([(5.0, 2.0), (6.0, 4.0)], 1.0) == 2.0
    assert interpolate([(5.0, 2.0)], 9.0) == 2.0


def test_published_tables_are_used_for_published_machines() -> None:
    machine = build("a100x4+xeon6462cx4")
    costs = Costs(machine.hardware.tables)
    slices = {simulated.slice.id: simulated for simulated in machine.slices}
    seven = model("llama-2-7b")
    # SLINFER section IV-A2: 567 ms to the first token of 1024 on the CPU, then 71 ms each.
    assert costs.step(step((0, 1024)), seven, slices["cpu0"], 1.0).floor_s == pytest.approx(0.567)
    one = costs.step(step((1024, 1)), seven, slices["cpu0"], 1.0).floor_s
    assert one == pytest.approx(0.071, abs=0.003)
    both = costs.step(step((1024, 1), (0, 1024)), seven, slices["cpu0"], 1.0).floor_s
    base = machine.hardware.tables.steps["llama-2-7b"]["cpu:cpu"].base_s
    assert both == pytest.approx(0.567 + one - base)


def seconds(simulated: SimulatedSlice, *parts: tuple[int, int], cached: float = 1.0) -> float:
    cost = Costs(Tables({})).step(step(*parts), model("llama-3.1-8b"), simulated, cached)
    return cost.floor_s


def test_measured_kernels_add_up() -> None:
    kernels, shape = MEASURED.kernels, shape_of("llama-3.1-8b")
    assert kernels is not None
    layer = sum(kernels.gemm_s(32, size) for size in linear_bytes(shape))
    layer += kernels.decodes_s(32 * 601 * 4096, 601 * 4096) + kernels.others_s
    output_s = kernels.gemm_s(32, 2 * 128_256 * 4096)
    activations_s = 24 * 32 * 4096 * 32 / MEASURED.hbm_bytes_per_s
    expected_s = 32 * layer + output_s + activations_s
    assert seconds(MEASURED, *[(600, 1)] * 32) == pytest.approx(expected_s)


def test_the_four_gemms_of_a_layer_are_those_of_the_checkpoint() -> None:
    measured = [6144 * 4096, 4096 * 4096, 28_672 * 4096, 4096 * 14_336]
    found = linear_bytes(shape_of("llama-3.1-8b"))
    assert found == pytest.approx([2.0 * one for one in measured], rel=1e-4)


def test_attention_of_few_tokens_takes_less_than_the_shortest_that_was_timed() -> None:
    kernels = MEASURED.kernels
    assert kernels is not None
    few, timed = kernels.decodes_s(32 * 4096, 32 * 4096), kernels.decodes_s(512 * 4096, 512 * 4096)
    assert few < 0.5 * timed
    assert timed == pytest.approx(12.11e-6, rel=0.01)  # alone, as it was timed


def in_a_row(costs: Costs, now: float, count: int, *parts: tuple[int, int]) -> list[float]:
    """Return the seconds of steps of an 8B that follow one another."""
    cost = costs.step(step(*parts), model("llama-3.1-8b"), MEASURED, 1.0)
    found: list[float] = []
    for _ in range(count):
        found.append(costs.lasting_s(cost, MEASURED, now))
        now += found[-1]
    return found


def test_prompts_in_a_row_take_longer_until_the_clock_is_what_power_sustains() -> None:
    costs = Costs(Tables({}))
    cost = costs.step(step((0, 2048)), model("llama-3.1-8b"), MEASURED, 1.0)
    assert MEASURED.kernels is not None
    power = MEASURED.kernels.power
    row = in_a_row(costs, 1000.0, 12, (0, 2048))
    assert row == sorted(row)
    assert cost.floor_s < row[0] < 1.05 * cost.floor_s
    sustained_s = cost.floor_s + (power.sustained - 1.0) * cost.arithmetic_s
    assert row[-1] == pytest.approx(sustained_s, rel=2e-3)
    assert in_a_row(costs, 2000.0, 1, (0, 2048)) == pytest.approx(row[:1]), "after a pause"


def test_the_clock_rises_while_arithmetic_rests() -> None:
    costs = Costs(Tables({}))
    row = in_a_row(costs, 1000.0, 12, (0, 2048))
    soon_s = 1000.0 + sum(row) + 0.1
    [again_s] = in_a_row(costs, soon_s, 1, (0, 2048))
    assert row[0] < again_s < row[-1]


def test_decodes_are_no_slower_at_a_fallen_clock() -> None:
    costs = Costs(Tables({}))
    prompts = in_a_row(costs, 1000.0, 12, (0, 2048))
    assert (
        in_a_row(costs, 1000.0 + sum(prompts), 2, *[(600, 1)] * 32)
        == [seconds(MEASURED, *[(600, 1)] * 32)] * 2
    )
    assert in_a_row(costs, 1e4, 12, *[(600, 1)] * 256)[-1] > seconds(MEASURED, *[(600, 1)] * 256), (
        "GEMMs of so many rows wait for arithmetic"
    )


def test_one_long_sequence_is_read_by_few_sms() -> None:
    one = seconds(MEASURED, (8191, 1)) - seconds(MEASURED, (15, 1))
    eight = seconds(MEASURED, *[(8191, 1)] * 8) - seconds(MEASURED, *[(15, 1)] * 8)
    assert eight < 4 * one


def test_weights_that_stream_are_not_read_in_memory() -> None:
    kept, half = seconds(MEASURED, (500, 1)), seconds(MEASURED, (500, 1), cached=0.5)
    assert 0.5 * kept < half < 0.6 * kept
    # A long prompt is bound by arithmetic, wherever its weights are.
    assert seconds(MEASURED, (0, 4096), cached=0.0) > 0.8 * seconds(MEASURED, (0, 4096))


@pytest.mark.parametrize("parts", [[(600, 1)] * 16, [(0, 2048)]])
def test_more_of_a_resource_shortens_what_it_binds(parts: list[tuple[int, int]]) -> None:
    assert MEASURED.kernels is not None
    memory = replace(MEASURED, kernels=MEASURED.kernels.faster(1.5, 1.0))
    compute = replace(MEASURED, kernels=MEASURED.kernels.faster(1.0, 1.5))
    by_memory, by_compute = seconds(memory, *parts), seconds(compute, *parts)
    if len(parts) > 1:
        assert by_memory < by_compute
    else:
        assert by_compute < by_memory


def test_a_partition_has_the_roofline() -> None:
    assert build("h200-x1:green4").slices[0].kernels is None


def prompts_s(apart_s: float) -> float:
    """Simulate nine prompts so far apart, after one that waits for its weights. Return the seconds
    of steps that did not wait for the link."""
    [llama] = catalogue("llama-3.1-8b")
    requests = [SimRequest(20.0 + apart_s * i, llama.spec.id, 2048, 1) for i in range(9)]
    first = SimRequest(0.0, llama.spec.id, 2048, 1)
    simulation = Simulation(
        build("h200-x1"), [llama], [first, *requests], None, Settings(as_live=True)
    )
    simulation.run()
    [one] = simulation.slices.values()
    return one.use.compute_s + one.use.memory_s


def test_simulated_prompts_in_a_row_take_longer_than_single_ones() -> None:
    assert 1.05 < prompts_s(0.01) / prompts_s(5.0) < 1.13
