"""The benchmark of steps that the cost model misses, without a GPU."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import step_phases
import torch
from fake_gpu import DEVICE, FakeMachine, PlainKernels

from c2cserve.engine.gpu import ops

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are interpreted here")


class HeldMachine(FakeMachine):
    def hold(self, seconds: float) -> None: ...

    def warm_gemms(self) -> tuple[int, float]:
        return 0, 0.0


def test_each_kind_of_step_has_its_times_and_the_gpus_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ops, "elementwise", PlainKernels)
    monkeypatch.setattr(ops, "attend", PlainKernels.attend)
    monkeypatch.setattr("step_launch._WARM", 1)
    for name, value in {
        "CONTEXTS": (5, 18), "DECODES": (1, 2), "PROMPTS": (7,), "_EVERY_S": 0.0001,
    }.items():  # fmt: skip
        monkeypatch.setattr(step_phases, name, value)
    out = tmp_path / "phases.json"
    given = step_phases.arguments(["--shapes", "tiny-llama", "--steps", "2", "--out", str(out)])
    rows = step_phases.measure(HeldMachine(), given, lambda: (1980.0, 350.0))
    assert [row.get("prompt_tokens") for row in rows] == [7, None, None, None, None]
    decodes = [(row["decodes"], row["context"]) for row in rows[1:]]
    assert decodes == [(1, 5), (2, 5), (1, 18), (2, 18)]
    assert all(row[time] > 0 for row in rows for time in ("wall_s", "host_s", "gpu_s"))
    assert all(row["after_prompts_s"] > 0 for row in rows[1:])
    assert {row["clock_mhz"] for row in rows} == {1980.0}
    assert json.loads(out.read_text())["results"]["steps"] == rows
    assert "2 decodes at 18" in capsys.readouterr().out


def test_without_nvml_there_is_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_phases, "find_nvml", lambda: None)
    assert step_phases.reader()() is None


def test_clock_and_power_are_those_of_nvml() -> None:
    nvml = Mock()
    nvml.nvmlDeviceGetClockInfo.return_value = 1755
    nvml.nvmlDeviceGetPowerUsage.return_value = 698_500
    assert step_phases.reader(nvml)() == (1755.0, 698.5)
