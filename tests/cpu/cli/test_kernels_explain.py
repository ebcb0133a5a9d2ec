"""`c2cserve kernels explain`: every candidate, the pick and why; clear words without a profile."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from c2cserve.cli import kernels_explain
from c2cserve.cli.kernels_explain import explain
from c2cserve.devices.gpus import GpuProblem
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.profile import Point, save_profile
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.terminal.output import CliError

PAPER = ("2048", "16384", "4096", "--home", "peer")
POINT = Point("prefetch", Tiles(), 2048, 16384, 4096, "bfloat16", "peer", 132, 390e-6)


@pytest.fixture(autouse=True)
def no_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine, whatever it is, has no profile and no GPU."""
    monkeypatch.setenv("C2CSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("c2cserve.devices.gpus.find_nvml", lambda: None)


def run(*args: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(explain)
    return CliRunner().invoke(app, args)


def refused(*args: str) -> CliError:
    error = run(*args).exception
    assert isinstance(error, CliError)
    return error


def profile_file(path: Path) -> str:
    points = (POINT, msgspec.structs.replace(POINT, n=8192, seconds=200e-6))
    return str(save_profile(msgspec.structs.replace(assumed_h200(), points=points), path))


def rows(output: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_assumed_speeds_are_marked_as_such() -> None:
    result = run(*PAPER, "--assume", "h200")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "O[2048, 16384] = X[2048, 4096] W[16384, 4096]^T, bfloat16, W at peer, 132 SMs"
    )
    assert lines[1] == "assumed: known speeds of an NVIDIA H200, nothing was measured here"
    assert lines[-3] == "floor: 372 us, the larger of cuBLAS and W once over the link"
    assert lines[-2].startswith("pick: direct (bx 256, cluster 8) is modelled at 408 us, 1.10x")
    assert lines[-1] == "serving: prefetch (whole), whose answers do not depend on where W is"


def test_the_table_is_sorted_and_marks_one_pick() -> None:
    table = rows(run(*PAPER, "--assume", "h200").stdout)
    micros = [int(row[3].replace(",", "")) for row in table if row[3]]
    assert micros == sorted(micros)
    assert [row[1] for row in table if row[0] == "->"] == ["direct"]
    assert {"prefetch", "direct", "ring", "sym", "asym", "hybrid"} <= {row[1] for row in table}
    [direct] = [row for row in table if row[1] == "direct"]
    assert direct[2:] == [
        "bx 256, cluster 8", "408", "1.10", "358", "400", "19", "8", "128 MiB", "1.00",
        "modelled, never timed",
    ]  # fmt: skip


def test_a_profile_says_what_is_measured(tmp_path: Path) -> None:
    file = profile_file(tmp_path / "profile.json")
    result = run(*PAPER, "--profile", file)
    assert "measured: NVIDIA H200, assumed, 2026-11-21" in result.stdout
    known = {row[2]: (row[10], row[11]) for row in rows(result.stdout) if row[1] == "prefetch"}
    assert known["panel rows 512, panel growth 2"][1] == "measured"
    assert known["panel rows 2048, panel growth 2"][1] == "modelled"
    assert "pick: prefetch (panel rows" in result.stdout
    result = run("2048", "12000", "4096", "--home", "peer", "--profile", file)
    known = {row[2]: row[11] for row in rows(result.stdout) if row[1] == "prefetch"}
    assert known["panel rows 512, panel growth 2"] == "interpolated"


def test_this_machines_profile_is_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile_file(tmp_path / "home" / "profile.json")
    assert "measured: NVIDIA H200" in run(*PAPER).stdout
    monkeypatch.setattr(kernels_explain, "_this_gpu", lambda: "NVIDIA H100")
    assert re.search(
        "NVIDIA H200, this is NVIDIA H100: run `c2cserve profile`", str(refused(*PAPER))
    )


def test_json_has_everything() -> None:
    args = ("64", "1536", "2048", "--home", "host", "--experts", "128", "--top-k", "8")
    answer = json.loads(run(*args, "--assume", "h200", "--json").stdout)
    assert answer["question"]["experts"] == 128
    assert answer["source"].startswith("assumed")
    [pick] = [one for one in answer["candidates"] if one["pick"]]
    assert pick["dataflow"] == "grouped"
    assert pick["terms"]["traffic"]["link_bytes"] > 8 * 1536 * 2048 * 2
    assert answer["floor_s"] < pick["predicted_s"]
    assert pick["predicted_s"] == min(one["predicted_s"] for one in answer["candidates"])


def test_slices_experts_and_hbm_are_described() -> None:
    slice_of_seven = run(*PAPER, "--sms", "16", "--neighbours", "6", "--assume", "h200").stdout
    assert "W at peer, 16 SMs, 6 other slices on the link" in slice_of_seven
    experts = run("8", "768", "2048", "--experts", "128", "--top-k", "8", "--assume", "h200").stdout
    assert "^T, 8 of 128 experts a row, bfloat16, W at host" in experts
    hbm = run("8", "768", "2048", "--home", "hbm", "--assume", "h200").stdout
    assert "the larger of cuBLAS and W read from HBM" in hbm


def test_without_a_profile_it_says_what_to_do() -> None:
    error = refused(*PAPER)
    assert error.exit_code == 1
    assert "run `c2cserve profile` (or explain with --assume h200)" in str(error)


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(nvml: object) -> tuple[()]:
        raise GpuProblem("GPU is lost")

    monkeypatch.setattr("c2cserve.devices.gpus.find_gpus", broken)
    assert "GPU is lost" in str(refused(*PAPER))


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ((*PAPER, "--assume", "h200", "--profile", "x.json"), 2, "give one of them"),
        ((*PAPER, "--assume", "h200", "--experts", "4"), 2, "top_k"),
        (
            ("8", "8", "9", "--experts", "4", "--top-k", "1", "--assume", "h200"),
            1,
            "K = 9 is not a multiple of 8",
        ),
        ((*PAPER, "--profile", "/nowhere.json"), 1, "/nowhere.json: this machine has no profile"),
    ],
)
def test_what_can_not_be_answered(args: tuple[str, ...], code: int, says: str) -> None:
    error = refused(*args)
    assert (error.exit_code, says in str(error)) == (code, True)


@pytest.mark.parametrize("args", [("0", "8", "8"), ("8", "8", "8", "--home", "moon"), ("8", "8")])
def test_wrong_usage_is_the_command_lines_to_refuse(args: tuple[str, ...]) -> None:
    assert run(*args, "--assume", "h200").exit_code == 2
