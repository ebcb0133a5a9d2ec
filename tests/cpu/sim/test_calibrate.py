"""A profile that is made out of a record is the machine that the record was made on."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from c2cserve.cli.main import app
from c2cserve.runtime.record import Record
from c2cserve.sim.planning.calibrate import CalibrationError, calibrate, observe, spread
from c2cserve.sim.recording import Recorders, no_recorders
from c2cserve.sim.run import Scenario, prepare
from c2cserve.sim.workload.build import WorkloadSettings
from c2cserve.sim.world.hardware import SimMachine, SliceSettings, build
from c2cserve.sim.world.requests import SimRequest, TrackedRequest
from c2cserve.sim.world.shapes import catalogue
from c2cserve.sim.world.simulation import Settings, Simulation

MODEL = "llama-3.2-3b"
PROMPTS = (16, 24, 32, 48, 64, 96, 128, 192)
BATCHES = (1, 2, 4, 8, 16)


def one_cpu() -> SimMachine:
    """Not bounded by memory, as live CPU slices are."""
    machine = build("a100x4+xeon6462cx4", SliceSettings(max_step_tokens=4096))
    simulated = next(simulated for simulated in machine.slices if simulated.slice.kind == "cpu")
    simulated = replace(
        simulated, slice=replace(simulated.slice, id="cpu0", hbm_bytes=0, kv_bytes=8 << 30)
    )
    return replace(machine, slices=(simulated,))


def run(
    machine: SimMachine, requests: list[SimRequest], noise: float,
    recorders: Recorders = no_recorders,
) -> list[TrackedRequest]:  # fmt: skip
    models = [
        replace(model, spec=replace(model.spec, id="m"), shape=replace(model.shape, table=MODEL))
        for model in catalogue(MODEL)
    ]
    settings = Settings(noise=noise, lookahead=1)
    simulation = Simulation(machine, models, requests, None, settings, recorders)
    simulation.run()
    return simulation.requests.ended


def calibration_load() -> list[SimRequest]:
    """Far enough apart that they do not meet, but for those that come together."""
    alone = [SimRequest(100.0 * i, "m", PROMPTS[i % 8], 1) for i in range(48)]
    together = [
        SimRequest(5000.0 + 300.0 * i, "m", 40, 24)
        for i, batch in enumerate(BATCHES * 2)
        for _ in range(batch)
    ]
    return alone + together


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Of a simulated machine whose steps are noisy."""
    machine = one_cpu()
    path = tmp_path / "record.jsonl"
    arguments = {"slice": machine.slices[0].slice, "max_in_flight": 1}
    recorder = Record(path, "cpu0/1", "slice", arguments)
    run(machine, calibration_load(), 0.05, lambda _: recorder)
    recorder.close()
    return path


def test_tables_are_those_of_the_machine(record: Path) -> None:
    found = calibrate(record)
    machine = one_cpu()
    true = machine.hardware.tables.get(MODEL, machine.slices[0].table)
    assert true is not None
    table = found.tables["m"]
    for tokens in PROMPTS[:3]:  # the first chunk of an unknown model is of 64 tokens
        assert table.prefill_s(0, tokens) == pytest.approx(true.prefill_s(0, tokens), rel=0.1)
    for batch in (1, 3, 8, 16):
        assert table.decode_s(batch, 60) == pytest.approx(true.decode_s(batch, 60), rel=0.1)
    assert 0.02 < found.noise < 0.1
    ratio, _ = spread(found.seen.steps, found.tables)
    assert ratio == pytest.approx(1.0, abs=0.03)


def medians(requests: list[TrackedRequest]) -> tuple[float, float]:
    return median(tracked.ttft_s for tracked in requests), median(
        tracked.tpot_s for tracked in requests
    )


def test_the_profile_simulates_like_the_machine(record: Path, tmp_path: Path) -> None:
    found = replace(calibrate(record), request_s=0.5)
    path = found.write(tmp_path / "profile")
    requests = [SimRequest(3.1 * i, "m", 30 + 7 * (i % 9), 5 + i % 20) for i in range(80)]
    true = run(one_cpu(), requests, 0.0)
    model = catalogue(MODEL)[0]
    model = replace(model, spec=replace(model.spec, id="m"), shape=replace(model.shape, table="m"))
    scenario = Scenario(str(path), "", WorkloadSettings(""), noise=0.0, lookahead=1)
    again = prepare(scenario, [model], requests)
    again.run()
    ttft_s, tpot_s = medians(true)
    assert medians(again.requests.ended) == pytest.approx((0.5 + ttft_s, tpot_s), rel=0.1)
    assert medians(again.requests.ended)[0] - 0.5 == pytest.approx(ttft_s, rel=0.1)
    (simulated,) = again.machine.slices
    assert replace(simulated.slice, gpu=None) == one_cpu().slices[0].slice


def test_only_what_lies_in_the_windows_counts(record: Path) -> None:
    everything, few = observe(record), observe(record, [(0.0, 950.0)])
    assert len(few.spans_s) == 10
    assert 0 < len(few.steps) < len(everything.steps)


def test_too_little_is_an_error(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CalibrationError, match="m: the record has too few steps"):
        calibrate(record, [(0.0, 950.0)])
    short = record.with_name("short.jsonl")
    short.write_text("".join(record.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(SystemExit) as ended:
        app(["calibrate", str(short), "--out", str(record.parent / "none")])
    assert ended.value.code == 1
    assert "has no steps" in capsys.readouterr().err


def test_the_command_writes_a_profile(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record.parent / "profile"
    with pytest.raises(SystemExit) as ended:
        app(["calibrate", str(record), "--out", str(folder), "--request-ms", "3"])
    assert ended.value.code == 0
    assert "--hardware" in capsys.readouterr().out
    assert build(str(folder / "hardware.toml")).hardware.request_s == 0.003
