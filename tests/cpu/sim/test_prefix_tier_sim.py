"""Cached prefixes in the host memory of simulated slices: the policy is the server's."""

from pathlib import Path

from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.policy.baselines.presets import C2CSERVE
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.runtime.replay import replay
from c2cserve.sim.recording import RecordFile
from c2cserve.sim.report import report
from c2cserve.sim.world.hardware import SliceSettings, build
from c2cserve.sim.world.requests import SimRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings, Simulation

PROMPT, FAMILIES = 3200, 6
BLOCK = 28 * 8 * 128 * 2 * 2 * BLOCK_TOKENS
"""Of Llama-3.2-3B, bytes."""


def conversations() -> list[SimRequest]:
    """Each family of prompts comes three times, after all others. The memory holds two of them."""
    return [
        SimRequest(
            float(number), "llama-3.2-3b/0", PROMPT, 4,
            tuple(1000 * (number % FAMILIES) + at for at in range(PROMPT // BLOCK_TOKENS)),
        )
        for number in range(3 * FAMILIES)
    ]  # fmt: skip


def run(host_bytes: int, record: Path) -> Simulation:
    slices = SliceSettings(
        kv_share=2.5 * PROMPT / BLOCK_TOKENS * BLOCK / 144e9, host_kv_bytes=host_bytes
    )
    server = AdmissionSettings(max_waiting=10**6)
    settings = Settings(C2CSERVE, server, seed=1, as_live=True)
    machine = build("gh200-144", slices, C2CSERVE)
    file = RecordFile(record, server)
    simulation = Simulation(
        machine, catalogue("llama-3.2-3b"), conversations(), None, settings, file
    )
    simulation.run()
    file.close()
    return simulation


def test_prompts_come_back_sooner_than_they_are_computed(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    without = run(0, tmp_path / "without.jsonl")
    with_tier = run(100 * PROMPT // BLOCK_TOKENS * BLOCK, record)
    use = with_tier.slices["gpu0"].use
    assert use.prefix_bytes > 0
    assert without.slices["gpu0"].use.prefix_bytes == 0
    assert use.tokens < without.slices["gpu0"].use.tokens
    assert all(one.ending == "finished" for one in with_tier.requests.ended)
    assert '"BringPrefix"' in record.read_text()
    assert replay(record).equal


def test_the_kv_of_prompts_crosses_the_link_once(tmp_path: Path) -> None:
    """A family's prompt goes out when it is computed first. Later ones find it in the arena or on
    the host, and no block of tokens that they draw fills up."""
    with_tier = run(100 * PROMPT // BLOCK_TOKENS * BLOCK, tmp_path / "record.jsonl")
    out = report(with_tier).links["gpu0.d2h"].moved_bytes
    assert out == FAMILIES * PROMPT // BLOCK_TOKENS * BLOCK
