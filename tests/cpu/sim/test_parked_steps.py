"""A step that was parked goes on after the step under way, however many were decided at once."""

import pytest

from c2cserve.core.request import Slo
from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation

ARRIVES_S, RESUMES_S = 1.0, 1.2


def first_token_s(lookahead: int) -> float:
    """Return when a request has its first token whose model is paused until `RESUMES_S`. Another
    model decodes all the while."""
    models = interleaved(catalogue("llama-3.1-8b*2"))
    busy, paused = (model.spec.id for model in models)
    asked = [SimRequest(0.0, paused, 100, 2), SimRequest(0.1, busy, 100, 2000)]
    asked.append(SimRequest(ARRIVES_S, paused, 100, 2))
    machine = build("h200-x1", SliceSettings(kv_share=1.0), PRESETS["c2cserve"])
    simulation = Simulation(
        machine, models, asked, lambda _: Slo(1.0, 0.25),
        Settings(PRESETS["c2cserve"], AdmissionSettings(patience=0.0), lookahead=lookahead),
    )  # fmt: skip

    def pause() -> None:
        [one] = simulation.slices.values()
        one.pause(paused)

    def resume() -> None:
        [one] = simulation.slices.values()
        one.resume(paused)

    simulation.timeline.at(ARRIVES_S - 0.1, pause)
    simulation.timeline.at(RESUMES_S, resume)
    simulation.run()
    last = max(simulation.requests.ended, key=lambda one: one.request.arrival_s)
    return last.first_s


def test_a_parked_step_waits_for_one_step() -> None:
    assert RESUMES_S < first_token_s(64) == pytest.approx(first_token_s(1), abs=0.02)
