"""`c2cserve profile`: what it says without a GPU, and what it does with what was measured."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from c2cserve.cli import profile as command
from c2cserve.cli.main import app
from c2cserve.kernels.gpu.aot.repository import KernelMissingError
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_h200
from c2cserve.kernels.gpu.gemm.choice.profile import Point, load_profile
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.profiling.survey import Refused
from c2cserve.terminal.output import CliError
from c2cserve.transfer.path_profile import PathProfile, Rates, load_paths, paths_path

POINT = Point("prefetch", Tiles(), 64, 4096, 4096, "bfloat16", "peer", 132, 1e-4)
MEASURED = msgspec.structs.replace(
    assumed_h200(), points=(POINT,), cut=("experts: 3 of 4 measurements, for lack of time",)
)
PATHS = PathProfile(
    "NVIDIA H200", datetime(2026, 11, 23, tzinfo=UTC), (Rates(55e9, 54e9, 100e9),) * 2, (102e9,),
    (Rates(101e9, 98e9, 126e9),), 16 << 20, (64 << 10) + 1, 0, 4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets it for CUDA; afterwards it is as before."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as done:
        app(["profile", *args])
    assert isinstance(done.value.code, int)
    return done.value.code


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A GPU that is measured at once. What the survey was asked for."""
    asked: list[dict[str, Any]] = []

    def survey(bench: object, *, tell: Callable[[str], None], **how: Any) -> object:
        tell("link to peer")
        asked.append(how)
        return MEASURED

    monkeypatch.setenv("C2CSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(command, "_open_bench", object)

    def measure_paths(bench: object, *, relays: bool) -> PathProfile | str:
        return PATHS if relays else "there are none"

    monkeypatch.setattr("c2cserve.profiling.survey.survey", survey)
    monkeypatch.setattr(command, "_measure_paths", measure_paths)
    return asked


def test_paths_lie_beside_the_profile(
    surveyed: list[dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    assert run("--gpu-relays") == 0
    assert load_paths("NVIDIA H200") == PATHS
    out = capsys.readouterr().out
    assert "GPU 1 by its link: in 55.0, out 54.0, both ways 100.0\n" in out
    assert "GPU 0 over 2 links: in 101.0, out 98.0, both ways 126.0\n" in out
    assert "a kernel of 4 CTAs carries segments in shorter than 64 KiB" in out
    path = tmp_path / "mine.json"
    assert run("--gpu-relays", "--out", str(path)) == 0
    assert load_paths("NVIDIA H200", paths_path(path)) == PATHS


def test_paths_that_cannot_be_measured_leave_a_profile(
    surveyed: list[dict[str, Any]], capsys: Any
) -> None:
    assert run() == 0
    assert "not measured: paths: there are none\n" in capsys.readouterr().out
    assert load_profile() == MEASURED
    assert not paths_path().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_clear_line(capsys: Any) -> None:
    assert run() == 1
    err = capsys.readouterr().err
    assert err.startswith(f"c2cserve: there is no GPU to measure: torch {torch.__version__} sees")
    assert err.count("\n") == 1


def test_the_profile_lies_where_it_is_looked_for(
    surveyed: list[dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    assert run() == 0
    assert load_profile() == MEASURED
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("1 measurements in ")
    assert out.rstrip().endswith(f": {tmp_path / 'home' / 'profile.json'}")
    assert "not measured: experts: 3 of 4 measurements, for lack of time" in out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert "396.0" in rows["peer"]
    assert "55.0 of 7" in rows["peer"]
    assert "4500" in rows["hbm"]


def test_another_file(surveyed: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "folder" / "mine.json"
    assert run("--out", str(path)) == 0
    assert load_profile(path) == MEASURED


@pytest.mark.parametrize(("args", "limit_s"), [((), 180.0), (("--quick",), 60.0)])
def test_it_has_its_time(
    surveyed: list[dict[str, Any]], args: tuple[str, ...], limit_s: float
) -> None:
    assert run(*args) == 0
    [how] = surveyed
    left_s = how["until_s"] - how["clock"]()
    assert 0.5 * limit_s < left_s < limit_s
    assert abs(how["clock"]() - time.monotonic()) < 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Refused("reads nothing"), "this GPU cannot be measured: reads nothing"),
        (OSError("out of paper"), "OSError: out of paper"),
    ],
)
def test_what_fails_is_one_line(
    surveyed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: Any,
    error: Exception, says: str, tmp_path: Path,
) -> None:  # fmt: skip
    def survey(*args: object, **how: object) -> None:
        raise error

    monkeypatch.setattr("c2cserve.profiling.survey.survey", survey)
    assert run() == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "home" / "profile.json").exists()


def test_kernels_that_are_not_built_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def bench() -> None:
        raise KernelMissingError(VARIANTS[0], tmp_path)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("c2cserve.profiling.gpu_bench.GpuBench", bench)
    with pytest.raises(CliError, match=r"is not in .* run `c2cserve kernels build --folder"):
        command._open_bench()


def test_the_gpu_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "c2cserve.profiling.gpu_bench", None)
    with pytest.raises(CliError, match=r"pip install '\.\[gpu\]'"):
        command._open_bench()
