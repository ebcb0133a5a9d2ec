"""The simulator's costs are as near to measured times as it says of itself."""

import json
from importlib.resources import files
from pathlib import Path

import cost_model
import pytest
from cost_model import CostModel, rows, summary
from kernel_times import table

from c2cserve.sim.show import step_times
from c2cserve.sim.world.hardware import names

PHASES = summary(list(rows("h200-x1")))


def ratios(phase: str) -> str:
    one = PHASES[phase]
    return f"{one['least']:.2f} to {one['largest']:.2f}"


@pytest.mark.parametrize(
    "phase", ["decode, up to 16", "in a row", "load", "switch", "rotation", "cpu"]
)
def test_all_cases_of_these_phases_are_within_a_tenth(phase: str) -> None:
    assert PHASES[phase]["within_tenth"] == 1.0


@pytest.mark.parametrize("phase", ["prefill", "decode, 32 to 256"])
def test_most_prompts_and_larger_decodes_are_within_a_tenth(phase: str) -> None:
    assert PHASES[phase]["within_tenth"] > 0.6
    assert PHASES[phase]["median"] == pytest.approx(1.0, abs=0.06)


def steps(picked_by: str) -> dict[str, object]:
    """Return a result of `step_phases.py` with a step of each kind."""
    times = {"gpu_s": 0.05, "wall_s": 0.06, "shape": "llama-8b", "attention": "own"}
    return {
        "results": {
            "picked_by": picked_by,
            "steps": [{**times, "prompt_tokens": 2048}, {**times, "decodes": 32, "context": 600}],
        }
    }


def test_steps_by_context_are_judged_where_they_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("profile_h200x2.json",):
        (tmp_path / name).write_text((cost_model.RESULTS / name).read_text())
    monkeypatch.setattr(cost_model, "RESULTS", tmp_path)
    ours, file = CostModel.of("h200-x1"), tmp_path / "phases.json"
    assert list(cost_model.by_context(ours, file.name)) == []
    assert "left out" in capsys.readouterr().out
    found: dict[str, list[cost_model.Row]] = {}
    for picked_by in ("profile of a day", "known speeds of an NVIDIA H200"):
        file.write_text(json.dumps(steps(picked_by)))
        found[picked_by[:5]] = list(cost_model.by_context(ours, file.name))
    once, row, decode = found["profi"]
    assert [one.measured_s for one in (once, row, decode)] == [0.05, 0.06, 0.06]
    assert once.simulated_s < row.simulated_s, "power limits prompts in a row"
    assert 1.05 < found["known"][2].simulated_s / decode.simulated_s < 1.15
    assert found["known"][:2] == [once, row], "prompts have cuBLAS's GEMMs in any case"


def test_the_kernel_times_are_those_of_the_results() -> None:
    packaged = files("c2cserve.sim") / "data" / "tables" / "h200_kernels.json"
    assert json.loads(packaged.read_text()) == json.loads(json.dumps(table()))


@pytest.mark.parametrize("machine", names())
def test_a_machine_says_how_far_its_step_times_are_from_measured_ones(machine: str) -> None:
    said = step_times(machine)
    ours = machine.startswith("h200")
    phases = ["decode, up to 16", "decode, 32 to 256", "prefill"]
    for phase in phases if ours else ["roofline, decode", "roofline, prefill"]:
        assert ratios(phase) in said


def test_a_machine_of_ones_own_is_compared_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'source = "mine"\n[host]\npool_bytes = 1\ndisk_bytes_per_s = 1.0\n[[devices]]\n'
        'name = "cpu"\ncount = 1\n[devices.layouts.whole]\nslices = 1\nkind = "cpu"\n'
        "hbm_bytes = 1000000000\nhbm_bytes_per_s = 1e9\nflops = 1e12\n"
    )
    assert "compared with no measurement" in step_times(str(path))
