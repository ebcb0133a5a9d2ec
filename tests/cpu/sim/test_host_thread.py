"""The thread of a simulated slice does one thing at a time. A slower GPU hides it."""

from dataclasses import replace

import pytest

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.step import SeqStep, Step
from c2cserve.policy.baselines.presets import C2CSERVE
from c2cserve.sim.world.hardware import Hardware, SimMachine, SimulatedSlice
from c2cserve.sim.world.host_thread import HostThread, HostTimes
from c2cserve.sim.world.requests import SimRequest, TrackedRequest
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation
from c2cserve.sim.world.tables import read_tables

TIMES = HostTimes(
    prefill_batch_s=0.001, prefill_launch=[(1, 0.010)], decode_s=0.002, switched_s=0.003,
    others_s=0.5,
)  # fmt: skip


def decode(step_id: int, model: str = "m") -> Step:
    return Step(step_id, model, (SeqStep("r", 20, 1, (), False, True),))


def prompt(step_id: int) -> Step:
    return Step(step_id, "m", (SeqStep("r", 0, 20, (), True, True),))


def test_steps_are_launched_one_after_another() -> None:
    thread = HostThread(replace(TIMES, others_s=0.0))
    assert thread.launch(decode(1), 1.0) == pytest.approx(1.002)
    assert thread.launch(decode(2, "other"), 1.0) == pytest.approx(1.005), "after a switch"
    assert thread.launch(prompt(3), 1.004) == pytest.approx(1.006), "its first kernel"
    assert thread.launch(decode(4), 1.0) == pytest.approx(1.018), "after its last one"


def test_a_prompts_launch_takes_what_its_length_was_measured_to_take() -> None:
    launch = [(16, 0.014), (64, 0.014), (128, 0.006), (512, 0.007)]
    thread = HostThread(replace(TIMES, others_s=0.0, prefill_launch=launch))
    for number, (tokens, launch_s) in enumerate([(20, 0.014), (96, 0.010), (4096, 0.007)]):
        step = Step(number, "m", (SeqStep("r", 0, tokens, (), True, True),))
        thread.launch(step, float(number))
        assert thread.launched_s(number) == pytest.approx(number + 0.001 + launch_s)


def test_what_is_neither_batch_nor_launch_comes_first() -> None:
    thread = HostThread(TIMES)
    assert thread.launch(decode(1), 1.0) == pytest.approx(1.502)
    assert thread.launch(decode(2), 5.0) == pytest.approx(5.502)


def test_the_end_of_a_launch_is_known_until_the_step_ends() -> None:
    thread = HostThread(replace(TIMES, others_s=0.0))
    thread.launch(prompt(1), 1.0)
    thread.launch(decode(2), 1.0)
    assert thread.launched_s(1) == pytest.approx(1.011)
    assert thread.launched_s(2) == pytest.approx(1.013)


def test_the_thread_takes_no_longer_for_a_decode_step_than_was_measured() -> None:
    """Its counters have captures of graphs in them. Prompts are none of that."""
    times = HostTimes(0.001, [(1, 0.010)], decode_s=0.003, switched_s=0.004, others_s=0.002)
    assert times.within(0.006) == times
    bounded = times.within(0.0025)  # half of it
    assert bounded == HostTimes(
        0.001, [(1, 0.010)], decode_s=0.0015, switched_s=0.002, others_s=0.001
    )


def test_a_step_lasts_from_its_launch_or_from_the_end_of_the_one_before() -> None:
    thread = HostThread(replace(TIMES, others_s=0.0))
    thread.launch(decode(1), 1.0)
    thread.launch(decode(2), 1.0)
    assert thread.ended(1, 1.1) == pytest.approx(0.1)
    assert thread.ended(2, 1.2) == pytest.approx(0.1)


def answer(host: HostTimes | None, step_s: float, prefill_s: float = 0.02) -> TrackedRequest:
    """Simulate a request for 101 tokens on a GPU whose decode steps take `step_s`."""
    table = {"prefill_ms": [[1, 1e3 * prefill_s]], "decode_ms": {"64": [[1, 1e3 * step_s]]}}
    tables = read_tables({"models": {"measured": {"gpu": table}}})
    gpu = Slice(
        "g", "gpu", kv_bytes=1 << 30, slab_bytes=64 << 20, gpu=GpuShare("g", 132),
        hbm_bytes=80 << 30, link="h2d", link_bytes_per_s=50e9,
    )  # fmt: skip
    simulated = SimulatedSlice(
        gpu, "g", flops=1e15, hbm_bytes_per_s=3e12, load_bytes_per_s=50e9, step_s=0.0, table="gpu",
        h2d=("h2d",), d2h=("d2h",), host=host,
    )  # fmt: skip
    hardware = Hardware("one", "", 1 << 40, 1e9, {}, (), tables)
    machine = SimMachine(hardware, (simulated,), (("h2d", 50e9), ("d2h", 50e9)))
    [model] = interleaved(catalogue("llama-3.2-1b"))
    model = replace(model, shape=replace(model.shape, table="measured"))
    requests = [SimRequest(5.0 * i, model.spec.id, 16, 101) for i in range(2)]
    simulation = Simulation(
        machine, [model], requests, None, Settings(C2CSERVE, as_live=True, noise=0.0)
    )
    simulation.run()
    return simulation.requests.ended[-1]  # the first one loads the weights


@pytest.mark.parametrize(("step_s", "tpot_s"), [(0.002, 0.003), (0.005, 0.005)])
def test_the_slower_one_of_host_and_gpu_sets_the_pace(step_s: float, tpot_s: float) -> None:
    """Two steps are in flight, so the other one's time is hidden."""
    alone = answer(None, step_s)
    assert alone.tpot_s == pytest.approx(step_s, rel=1e-3)
    host = HostTimes(0.001, [(1, 0.010)], decode_s=0.002, switched_s=0.002, others_s=0.001)
    with_host = answer(host, step_s)
    assert with_host.tpot_s == pytest.approx(tpot_s, rel=0.03)
    assert with_host.ttft_s - alone.ttft_s == pytest.approx(0.002, rel=0.01), "its first launch"


@pytest.mark.parametrize(("prefill_s", "ttft_s"), [(0.004, 0.012), (0.020, 0.022)])
def test_a_prompt_takes_the_longer_one_of_its_launch_and_the_gpus_time(
    prefill_s: float, ttft_s: float
) -> None:
    """The GPU begins with the first kernel, and has the last one when all are launched. So the
    host's time counts once."""
    host = HostTimes(0.001, [(1, 0.010)], decode_s=0.002, switched_s=0.002, others_s=0.001)
    assert answer(host, 0.002, prefill_s).ttft_s == pytest.approx(ttft_s, rel=1e-3)
