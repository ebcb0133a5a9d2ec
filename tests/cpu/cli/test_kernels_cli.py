"""`c2cserve kernels build|list|check|clean`, with a compiler that does as told."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from c2cserve.cli.main import app
from c2cserve.kernels.gpu.aot import compiler, flash_modules
from c2cserve.kernels.gpu.aot.flash_modules import MODULES, FlashKind
from c2cserve.kernels.gpu.aot.variants import SHARED_BYTES
from c2cserve.kernels.gpu.aot.warm import COMMON, Sizes
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS

FakeNvcc = Callable[..., Path]

FEW = VARIANTS[:5]


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("C2CSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("c2cserve.cli.kernels.VARIANTS", FEW)
    monkeypatch.setattr("c2cserve.cli.kernels.installed", lambda: None)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as done:
        app(["kernels", *args])
    assert isinstance(done.value.code, int)
    return done.value.code


def listed(capsys: Any, *args: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert run("list", "--json", *args) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_build_then_build_again(fake_nvcc: FakeNvcc, tmp_path: Path, capsys: Any) -> None:
    log, folder = fake_nvcc(), tmp_path / "home" / "kernels"
    assert run("build") == 0
    said = capsys.readouterr().out
    assert said.startswith("built 5 of 5 kernels in ")
    built, triton, flash = said.splitlines()
    assert built.endswith(f": {folder}")
    assert flash.startswith("FlashInfer's attention: not built, it is not installed")
    assert triton.startswith("Triton's kernels: not compiled, no GPU here")
    assert len(list(folder.glob("*.cubin"))) == 5
    assert run("build") == 0
    assert capsys.readouterr().out.startswith(f"every kernel was built: {folder}\n")
    assert len(log.read_text().splitlines()) == 5
    assert run("build", "--force") == 0
    assert len(log.read_text().splitlines()) == 10


def test_build_fills_tritons_cache_where_a_gpu_is(
    fake_nvcc: FakeNvcc, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc()
    warmed: list[Sizes] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("c2cserve.kernels.gpu.aot.warm.warm", lambda sizes, _: warmed.append(sizes))
    assert run("build") == 0
    assert warmed == COMMON
    assert f"for {len(COMMON)} sizes" in capsys.readouterr().out


def test_a_folder_of_ones_own(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    fake_nvcc()
    folder = str(tmp_path / "mine")
    assert run("build", "--folder", folder) == 0
    assert run("check", "--folder", folder) == 0
    assert run("check") == 1


def test_list_says_what_is_built(fake_nvcc: FakeNvcc, tmp_path: Path, capsys: Any) -> None:
    fake_nvcc()
    compiler.build(FEW[:2], compiler.default_folder())
    rows = listed(capsys)
    assert [row["state"] for row in rows.values()] == ["built"] * 2 + ["missing"] * 3
    first = rows[FEW[0].name]
    assert (first["registers"], first["stages"]) == (168, FEW[0].stages)
    assert (first["shared_bytes"], first["defines"]["BX"]) == (SHARED_BYTES, str(FEW[0].bx))
    assert rows[FEW[4].name]["registers"] is None
    assert run("list") == 0
    out = capsys.readouterr().out
    assert all(variant.name in out for variant in FEW)
    assert "227 KiB of shared memory" in out
    assert f"5 kernels, 2 built, 3 missing: {tmp_path / 'home' / 'kernels'}" in out


def test_check_names_all_that_is_not_right(
    fake_nvcc: FakeNvcc, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiler.default_folder()
    spills = "8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 255 registers"
    fake_nvcc(says=spills)
    compiler.build(FEW[:1], folder)
    fake_nvcc()
    compiler.build(FEW[1:3], folder)
    stale = compiler.cubin_path(folder, FEW[2])
    stale.rename(folder / f"{FEW[2].name}.0123456789abcdef.cubin")
    assert run("check") == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"{FEW[0].name} uses local memory: 8 bytes stack",
        f"{FEW[2].name} is stale: its sources have changed since",
        f"{FEW[3].name} is not built",
        f"{FEW[4].name} is not built",
    ]
    assert "4 of 5 kernels are not fit to serve with" in captured.err
    states = [row["state"] for row in listed(capsys).values()]
    assert states == ["unfit: 8 bytes stack", "built", "stale", "missing", "missing"]


def test_build_ends_with_1_if_a_kernel_spills(fake_nvcc: FakeNvcc, capsys: Any) -> None:
    fake_nvcc(
        says="0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\nUsed 9 registers"
    )
    assert run("build") == 1
    assert f"{FEW[4].name} uses local memory: 4 bytes spilled" in capsys.readouterr().out


def test_clean_removes_what_is_stale(fake_nvcc: FakeNvcc, capsys: Any) -> None:
    fake_nvcc()
    assert run("build") == 0
    folder = compiler.default_folder()
    (folder / "direct-bfloat16-x16.0123456789abcdef.cubin").touch()
    (folder / "gone-bfloat16-x16.0123456789abcdef.json").touch()
    assert run("clean") == 0
    assert "removed 2 files" in capsys.readouterr().out
    assert run("check") == 0


def test_what_the_compiler_says_is_shown(fake_nvcc: FakeNvcc, capsys: Any) -> None:
    fake_nvcc(status=1, says="direct.cu(7): error: this is wrong\n1 error detected")
    assert run("build") == 1
    err = capsys.readouterr().err.splitlines()
    assert err[:2] == ["direct.cu(7): error: this is wrong", "1 error detected"]
    assert err[2].startswith("c2cserve: nvcc failed on direct-bfloat16-x")


def test_no_compiler_is_one_line(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compiler, "_TOOLKIT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run("build") == 1
    err = capsys.readouterr().err
    assert err.startswith("c2cserve: no CUDA compiler (nvcc 13): `pip install '.[gpu]'`")
    assert err.count("\n") == 1
    assert run("list") == 0
    assert run("check") == 1


def test_explain_is_one_of_them(capsys: Any) -> None:
    assert run("explain", "64", "4096", "4096", "--assume", "h200") == 0
    assert "pick:" in capsys.readouterr().out


def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Images are built, and checked, where there is none."""
    probe = (
        "import sys; sys.modules['torch'] = sys.modules['cuda'] = sys.modules['msgspec'] = None\n"
        "from c2cserve.cli.main import app\n"
        "app(['kernels', 'check', '--folder', sys.argv[1]])"
    )
    command = [sys.executable, "-c", probe, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{VARIANTS[0].name} is not built" in done.stdout


def test_flashinfers_attention(
    fake_nvcc: FakeNvcc, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built after all else, listed with its kernels, missed by `check` without a fault."""
    fake_nvcc()
    asked: list[Path] = []

    def build(folder: Path, version: str, *, force: bool) -> list[FlashKind]:
        asked.append(flash_modules.modules_folder(folder, version))
        return list(MODULES)

    monkeypatch.setattr("c2cserve.cli.kernels.installed", lambda: "0.7.2")
    monkeypatch.setattr(flash_modules, "build", build)
    assert run("build") == 0
    assert "FlashInfer's attention: built 3 of 3 modules in " in capsys.readouterr().out
    assert asked == [tmp_path / "home" / "kernels" / "flashinfer-0.7.2"]
    rows = listed(capsys)
    assert [rows[kind.name]["state"] for kind in MODULES] == ["missing"] * 3
    assert run("list") == 0
    assert "8 kernels, 5 built, 3 missing" in capsys.readouterr().out
    assert run("check") == 0
    assert f"{MODULES[0].name} is not built: prompts take our own" in capsys.readouterr().out

    def fail(folder: Path, version: str, *, force: bool) -> list[FlashKind]:
        raise compiler.BuildError("flashinfer_bfloat16_128 failed\nprefill.cu(7): error")

    monkeypatch.setattr(flash_modules, "build", fail)
    assert run("build") == 1
    assert "prefill.cu(7): error" in (said := capsys.readouterr()).err
    assert "Triton's kernels: " in said.out
