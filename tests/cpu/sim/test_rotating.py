"""KV rotates in simulated worlds, whose books assert that no block is read, written or held by two
(`sim.world.checks`): everybody ends, in any mix of room, lengths and cancelled slices."""

from dataclasses import replace
from random import Random

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.request import Slo
from c2cserve.policy.baselines.presets import C2CSERVE, FCFS, SUPERINFER, Preset
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.slice.rotation import RotationSettings
from c2cserve.sim.report import report
from c2cserve.sim.world.faults import Fault, parse_fault
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings, Simulation

BLOCK = 28 * 8 * 128 * 2 * 2 * 16
"""Of Llama-3.2-3B, bytes."""


def run(
    requests: list[SimRequest],
    preset: Preset,
    kv_share: float,
    host: int,
    models: str = "llama-3.2-3b",
    max_batch: int = 64,
    faults: tuple[Fault, ...] = (),
    ttft_s: float = 5.0,
) -> Simulation:
    machine = build(
        "gh200-144",
        SliceSettings(kv_share=kv_share, max_batch=max_batch, host_kv_bytes=host),
        preset,
    )
    plain = AdmissionSettings(max_waiting=10**6, patience=0.0)
    simulation = Simulation(
        machine, catalogue(models), requests, lambda prompt: Slo(ttft_s, 0.1),
        Settings(preset, plain, seed=1, noise=0.05, faults=faults),
    )  # fmt: skip
    simulation.run()
    return simulation


def crowd(count: int, gap_s: float, prompt: int, output: int, model: str) -> list[SimRequest]:
    return [SimRequest(i * gap_s, model, prompt, output) for i in range(count)]


def test_a_burst_gets_first_tokens_while_earlier_requests_wait_on_the_host() -> None:
    requests = crowd(60, 0.02, 600, 400, "llama-3.2-3b/0")
    fcfs = run(requests, FCFS, 0.012, 0, ttft_s=1.0)
    rotating = run(requests, SUPERINFER, 0.012, 64 * BLOCK * 60, ttft_s=1.0)
    assert rotating.slices["gpu0"].use.moved_bytes > 0
    assert all(tracked.ending == "finished" for tracked in rotating.requests.ended)
    assert report(rotating).ttft_attainment > report(fcfs).ttft_attainment + 0.2
    assert report(rotating).preempted == 0, "nothing is computed twice"


def cut(host: int, slo: Slo) -> Simulation:
    """An 8B whose memory has 1 GiB for KV, under more requests than that holds: five or six."""
    models, random, now = catalogue("llama-3.1-8b"), Random(1), 0.0
    machine = build("h200-x1", SliceSettings(kv_share=1.0, max_batch=256, host_kv_bytes=host))
    simulated = machine.slices[0]
    size = models[0].spec.weight_bytes + (1 << 30) & -(2 << 20)
    slice_ = replace(simulated.slice, hbm_bytes=size, kv_bytes=size)
    machine = replace(machine, slices=(replace(simulated, slice=slice_),))
    requests: list[SimRequest] = []
    for _ in range(60):
        now += random.expovariate(10.0)
        lengths = random.randint(500, 1500), random.randint(100, 300)
        requests.append(SimRequest(now, models[0].spec.id, *lengths))
    settings = Settings(
        C2CSERVE, AdmissionSettings(max_waiting=10**6, patience=0.0), seed=1, as_live=True
    )
    simulation = Simulation(machine, models, requests, lambda prompt: slo, settings)
    simulation.run()
    return simulation


def test_the_controller_counts_on_turns_and_first_tokens_come_sooner() -> None:
    first_come = cut(0, Slo(3600.0, 3600.0)).requests.ended
    rotating = cut(16 << 30, Slo(2.0, 0.1))
    shares = [
        (sum(one.ttft_s <= 2.0 for one in ended), sum(one.tpot_s <= 0.1 for one in ended))
        for ended in (first_come, rotating.requests.ended)
    ]
    assert shares[1][0] >= 1.5 * shares[0][0]
    assert shares[1][1] >= shares[0][1] == 60
    assert rotating.slices["gpu0"].use.moved_bytes > 0
    assert max(one.last_s for one in rotating.requests.ended) < 1.05 * max(
        one.last_s for one in first_come
    ), "no time is lost to exchanges"


def test_two_runs_are_equal() -> None:
    requests = crowd(40, 0.02, 600, 200, "llama-3.2-3b/0")
    runs = [run(requests, SUPERINFER, 0.012, 10**12) for _ in range(2)]
    assert report(runs[0]) == report(runs[1])


def test_without_host_memory_nothing_moves() -> None:
    requests = crowd(30, 0.02, 600, 200, "llama-3.2-3b/0")
    assert run(requests, SUPERINFER, 0.012, 0).slices["gpu0"].use.moved_bytes == 0


worlds = st.lists(
    st.tuples(
        st.sampled_from(["llama-3.2-3b/0", "llama-3.2-1b/0"]), st.floats(0, 1),
        st.integers(1, 900), st.integers(1, 120),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@settings(max_examples=examples(40), deadline=None)
@given(
    worlds, st.sampled_from([C2CSERVE, SUPERINFER]), st.sampled_from([0.003, 0.006, 0.02]),
    st.sampled_from([10, 300, 10**5]), st.sampled_from([0, 200, 5000]), st.integers(1, 16),
    st.sampled_from([(), (parse_fault("slice:gpu0@0.5+0.3"),)]),
)  # fmt: skip
def test_everybody_ends_and_memory_is_conserved(
    drawn: list[tuple[str, float, int, int]],
    preset: Preset,
    kv_share: float,
    host_blocks: int,
    transfer_blocks: int,
    max_batch: int,
    faults: tuple[Fault, ...],
) -> None:
    rotation = RotationSettings(transfer_bytes=transfer_blocks * BLOCK)
    requests = [
        SimRequest(at, model, prompt, output)
        for model, at, prompt, output in sorted(drawn, key=lambda one: one[1])
    ]
    world = run(
        requests, replace(preset, rotation=rotation), kv_share, host_blocks * BLOCK,
        "llama-3.2-3b,llama-3.2-1b", max_batch, faults,
    )  # fmt: skip
    assert len(world.requests.ended) == len(requests)
    assert all(tracked.ending == "finished" for tracked in world.requests.ended)
    policy = world.slices["gpu0"].policy
    assert policy.running == policy.waiting == 0
    assert policy.arena.held_bytes == 0
    assert world.slices["gpu0"].book.held_bytes == 0
