"""First tokens of absent models in simulated worlds: the later of the load and the compute."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.request import Slo
from c2cserve.core.step import SeqStep, Step
from c2cserve.policy.baselines.presets import C2CSERVE
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation
from c2cserve.sim.world.weight_cache import ArrivingSteps

STEP = Step(1, "m", (SeqStep("r", 0, 100, (), fresh=True, emits=True),))
LAYERS = 10


def ends_s(begins_s: float, load_s: float, compute_s: float) -> float:
    """When a step ends that begins then, of a model whose load begins at 0."""
    arriving = ArrivingSteps()
    arriving.begin(STEP, begins_s, compute_s / load_s)
    arriving.arrived(STEP, 0.0, load_s, LAYERS)
    return load_s + arriving.left_s(STEP, compute_s)


def layer_by_layer_s(begins_s: float, load_s: float, compute_s: float) -> float:
    """The same, one layer after another."""
    now = begins_s
    for layer in range(1, LAYERS + 1):
        now = max(now, load_s * layer / LAYERS) + compute_s / LAYERS
    return now


@given(
    begins=st.floats(0.0, 1.0), load_s=st.floats(0.01, 10.0), compute_s=st.floats(0.001, 30.0)
)  # fmt: skip
def test_a_step_ends_when_its_last_layer_does(
    begins: float, load_s: float, compute_s: float
) -> None:
    begins_s = begins * load_s
    want = layer_by_layer_s(begins_s, load_s, compute_s)
    assert ends_s(begins_s, load_s, compute_s) == pytest.approx(want)


def test_others_in_its_lane_get_what_it_leaves() -> None:
    arriving = ArrivingSteps()
    assert arriving.slowdown("resident") == 1.0
    arriving.begin(STEP, 0.0, 0.25)
    arriving.begin(replace(STEP, id=2), 0.0, 7.0)
    assert arriving.slowdown("resident") == 1.0 + 0.25 + 1.0
    assert arriving.slowdown("streaming") == 1.0
    arriving.arrived(STEP, 0.0, 1.0, LAYERS)
    arriving.dropped(replace(STEP, id=2))
    assert arriving.slowdown("resident") == 1.0, "what is left of it is a step in the line"
    assert arriving.left_s(replace(STEP, id=3), 2.0) == 2.0, "no load of its model was under way"


ROOM = 20 * 10**9
"""The slice's memory: one of two models fits."""


def first_token_s(prompt: int, *, cold: bool) -> float:
    """The first token of a model whose speed is known, loaded for another one meanwhile or not."""
    name, other = "llama-3.1-8b/0", "llama-3.1-8b/1"
    asked = [SimRequest(2.0 * i, name, 64, 1) for i in range(3)]
    asked += [SimRequest(6.0, other if cold else name, 64, 1), SimRequest(9.0, name, prompt, 1)]
    machine = build("h200-x1", SliceSettings(kv_share=1.0, max_step_tokens=8192), C2CSERVE)
    [one] = machine.slices
    small = replace(one, slice=replace(one.slice, hbm_bytes=ROOM, kv_bytes=ROOM))
    simulation = Simulation(
        replace(machine, slices=(small,)), interleaved(catalogue("llama-3.1-8b*2")), asked,
        lambda _: Slo(60.0, 60.0),
        Settings(C2CSERVE, AdmissionSettings(patience=0.0), seed=1, noise=0.0),
    )  # fmt: skip
    simulation.run()
    assert all(one.ending == "finished" for one in simulation.requests.ended)
    last = max(simulation.requests.ended, key=lambda one: one.request.arrival_s)
    return last.ttft_s


@pytest.mark.parametrize("prompt", [64, 512, 4000])
def test_a_first_token_of_an_absent_model_takes_as_long_as_its_load(prompt: int) -> None:
    load_s = 16.06e9 / 55.4e9
    alone_s = first_token_s(prompt, cold=False)
    assert first_token_s(prompt, cold=True) == pytest.approx(load_s + alone_s / 32, rel=0.02)
