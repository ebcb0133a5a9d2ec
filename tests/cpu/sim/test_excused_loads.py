"""Controller, slices and the judge of a simulation agree on what loads excuse."""

from dataclasses import replace
from random import Random

import pytest

from c2cserve.core.request import Request, Slo
from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.policy.cluster.admission import Admission, AdmissionSettings
from c2cserve.sim.report import in_time
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest, TrackedRequest
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation

MEMORY = 40 * 10**9
"""The slice's: two of six models fit."""


def simulation(preset: str, slo: Slo) -> Simulation:
    random, now = Random(0), 0.0
    models = interleaved(catalogue("llama-3.1-8b*6"))
    asked: list[SimRequest] = []
    for _ in range(60):
        now += random.expovariate(8.0)
        asked.append(SimRequest(now, random.choice(models).spec.id, 200, random.randint(1, 40)))
    machine = build("h200-x1", SliceSettings(kv_share=1.0), PRESETS[preset])
    [one] = machine.slices
    small = replace(one, slice=replace(one.slice, hbm_bytes=MEMORY, kv_bytes=MEMORY))
    return Simulation(
        replace(machine, slices=(small,)), models, asked, lambda _: slo,
        Settings(PRESETS[preset], AdmissionSettings(patience=0.0), seed=1),
    )  # fmt: skip


def run(
    preset: str, slo: Slo, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[TrackedRequest], dict[str, float]]:
    """Return what has ended, and what the controller took for excused at first tokens."""
    believed: dict[str, float] = {}
    first_token = Admission.first_token

    def note(self: Admission, request_id: str, after_s: float) -> None:
        request, _, slice_id, _ = self._sent[request_id]
        believed[request_id] = self._slices[slice_id].excused_s(request)
        first_token(self, request_id, after_s)

    with monkeypatch.context() as patched:
        patched.setattr(Admission, "first_token", note)
        one = simulation(preset, slo)
        one.run()
    return one.requests.ended, believed


@pytest.mark.parametrize("preset", ["c2cserve", "serverlessllm"])
def test_controller_and_judge_excuse_the_same(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, believed = run(preset, Slo(0.5, 0.1, excuses_loads=True), monkeypatch)
    started = [one for one in ended if one.sampled]
    assert {one.request.id: pytest.approx(one.grace_s, abs=1e-6) for one in started} == believed
    assert sum(one.grace_s > 0.0 for one in started) >= 3


def test_a_first_token_is_in_time_beside_what_is_excused() -> None:
    request = Request("r", "m", 10, 10, 1.0, Slo(0.5, 0.1, excuses_loads=True))
    assert in_time(TrackedRequest(request, 1, first_s=1.7, grace_s=0.3))
    assert not in_time(TrackedRequest(request, 1, first_s=1.7, grace_s=0.1))


def test_nothing_is_excused_where_targets_do_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, believed = run("c2cserve", Slo(0.5, 0.1), monkeypatch)
    assert not any(believed.values())
    assert all(one.grace_s == 0.0 for one in ended)
    assert not any(in_time(one) and one.ttft_s > 0.5 for one in ended)
