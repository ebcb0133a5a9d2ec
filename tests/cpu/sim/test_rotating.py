"""KV rotates in simulated worlds, whose books assert that no block is read, written or held by two
(`sim.world.checks`): everybody ends, in any mix of room, lengths and cancelled slices."""

from dataclasses import replace

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
