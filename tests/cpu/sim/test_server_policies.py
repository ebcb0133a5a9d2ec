"""A simulation of a server has the server's own policies: its record replays through those."""

from pathlib import Path
from random import Random
from typing import get_args

import msgspec
import pytest

from c2cserve.core.policy_names import PolicyName
from c2cserve.policy.baselines.presets import C2CSERVE, PRESETS
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.runtime.replay import RecordError, replay
from c2cserve.sim.recording import RecordFile
from c2cserve.sim.run import Scenario
from c2cserve.sim.run import simulate as simulate_scenario
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue, interleaved
from c2cserve.sim.world.simulation import Settings, Simulation

MODELS = "llama-3.2-3b*3,llama-3.1-8b*3"
"""67 GB of weights, for seven slices of 20 GB each: models of 8B take turns with others."""


def simulate(path: Path, server: AdmissionSettings | None) -> None:
    """Record a simulation; `server` None: not as a server's."""
    slices = SliceSettings(kv_share=1.0, max_batch=2, host_kv_bytes=4 << 30)
    models = interleaved(catalogue(MODELS))
    random, now = Random(5), 0.0
    requests: list[SimRequest] = []
    for _ in range(80):
        now += random.expovariate(20.0)
        name = random.choice(models).spec.id
        requests.append(SimRequest(now, name, random.randint(16, 2000), random.randint(4, 90)))
    settings = Settings(C2CSERVE, server or AdmissionSettings(), seed=5, as_live=server is not None)
    file = RecordFile(path, server)
    machine = build("h200-x1:green7", slices)
    Simulation(machine, models, requests, None, settings, file).run()
    file.close()


def actions_of(path: Path) -> set[str]:
    lines = (msgspec.json.decode(line) for line in path.read_bytes().splitlines())
    return {kind for line in lines for kind, _ in line.get("actions", ())}


def test_a_record_replays_through_the_policies_of_a_server(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    simulate(path, AdmissionSettings(max_waiting=1_000_000))
    found = replay(path)
    assert found.equal
    assert len(found.streams) == 8
    assert {"Dispatch", "Activate", "Fetch", "Release", "Move", "RunStep"} <= actions_of(path)


@pytest.mark.parametrize(
    "lengths", [",prompt=1000,output=20", pytest.param("", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", get_args(PolicyName))
def test_a_simulated_preset_is_the_one_that_a_server_runs(
    name: str, lengths: str, tmp_path: Path
) -> None:
    path = tmp_path / "record.jsonl"
    limit = WorkloadSettings(f"synthetic:rate=4,duration=20{lengths}", limit=60)
    scenario = Scenario(
        "h200-x1:green4", "llama-3.2-3b*4", limit, policy=name, as_live=True,
        slices=SliceSettings(kv_share=1.0, host_kv_bytes=4 << 30),
    )  # fmt: skip
    found = simulate_scenario(scenario, record=path)
    assert found.requests == found.finished + found.rejected
    # No stream of these models is in time over a quarter of such a link.
    budgeted = PRESETS[name].placing == "streams"
    assert found.finished == found.requests or budgeted
    assert found.finished
    replayed = replay(path)
    assert replayed.equal, [stream.difference for stream in replayed.streams]


def test_a_record_of_other_policies_says_so(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    simulate(path, None)
    with pytest.raises(RecordError, match="simulation"):
        replay(path)
