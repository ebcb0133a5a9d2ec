"""The simulator's costs are as near to measured times as it says of itself."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from cost_model import rows, summary
from kernel_times import table

from c2cserve.sim.show import step_times
from c2cserve.sim.world.hardware import names

PHASES = summary(list(rows("h200-x1")))


def ratios(phase: str) -> str:
    one = PHASES[phase]
    return f"{one['least']:.2f} to {one['largest']:.2f}"


@pytest.mark.parametrize("phase", ["load", "switch", "rotation"])
def test_what_the_link_does_is_within_a_tenth(phase: str) -> None:
    assert PHASES[phase]["within_tenth"] == 1.0


@pytest.mark.parametrize("phase", ["prefill", "decode, up to 16", "decode, 32 to 256"])
def test_most_prompts_and_decodes_are_within_a_tenth(phase: str) -> None:
    assert PHASES[phase]["within_tenth"] > 0.65
    assert PHASES[phase]["median"] == pytest.approx(1.0, abs=0.06)


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
