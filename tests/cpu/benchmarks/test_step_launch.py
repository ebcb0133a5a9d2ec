"""The benchmark of launching without a GPU: every kind of step has its row, and the profile its
table."""

import json
from pathlib import Path

import pytest
import step_launch
import torch
from fake_gpu import DEVICE, FakeMachine, PlainKernels

from c2cserve.engine.gpu import ops

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are interpreted here")


class HeldMachine(FakeMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held_s: list[float] = []

    def hold(self, seconds: float) -> None:
        self.held_s.append(seconds)

    def warm_gemms(self) -> tuple[int, float]:
        return 92, 0.5


@pytest.mark.parametrize("kept", [False, True])
def test_every_kind_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: bool
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ops, "elementwise", PlainKernels)
    monkeypatch.setattr(ops, "attend", PlainKernels.attend)
    for name, value in {
        "CONTEXT": 18, "DECODES": (1, 3), "MIXED": ((1, 5), (2, 5)), "PROMPTS": (5,), "_WARM": 1,
        "NEW_LENGTHS": (3, 4), "LIVE_PROMPTS": 3, "_LIVE_MEDIAN": 6, "_LIVE_MOST": 9,
        "_LIVE_DECODES": 2, "_LIVE_PAUSE_S": 0.0, "_FIRST_PROMPT": 5,
    }.items():  # fmt: skip
        monkeypatch.setattr(step_launch, name, value)
    out = tmp_path / "steps.json"
    given = ["--shape", "tiny-llama", "--steps", "2", "--profile", "--out", str(out)]
    machine = HeldMachine()
    rows = step_launch.measure(machine, step_launch._arguments(given + ["--kept", "--warm"] * kept))
    kinds = [(row["decodes"], row["prompt_tokens"]) for row in rows]
    assert kinds == [(1, 0), (3, 0), (1, 5), (2, 5), (0, 5)]
    times = ("wall_s", "host_s", "gpu_s", "launched_wall_s")
    assert all(row[time] > 0 for row in rows for time in times)
    assert len(machine.held_s) == 2 * len(rows)
    results = json.loads(out.read_text())["results"]
    assert results["steps"] == rows
    assert [len(took_s) for took_s in results["lengths"].values()] == [2, 2, 3, 3]
    assert (results["gemms_warmed"], results["gemm_warm_s"]) == ((92, 0.5) if kept else (0, 0.0))
    out_text = capsys.readouterr().out
    assert "2 decodes + prompt of 5" in out_text
    assert "3 prompts, live again" in out_text
