"""Benchmarks, scripts and GPU tests import what is there: most of them run only by hand."""

import re
from pathlib import Path

import pytest
from program_imports import ROOT, missing_modules, problems

SHARED = tuple(
    ROOT / folder
    for folder in (
        "tests",
        "benchmarks",
        "tests/e2e",
        "tests/cluster",
        "tests/cpu/engine",
        "tests/cpu/kernels",
        "tests/cpu/policy",
    )
)
"""What `tests/conftest.py`, and GPU tests themselves, put on the path."""
CLIENTS = ROOT / "scripts" / "clients" / "programs"
"""They run in environments of their own, with the packages that they are about."""
PROGRAMS = sorted(
    path
    for folder in ("benchmarks", "scripts", "examples", "tests/gpu", "tests/soak")
    for path in (ROOT / folder).rglob("*.py")
    if path.parent != CLIENTS
)
SHELL = sorted(
    path
    for folder in ("scripts", "benchmarks")
    for path in (ROOT / folder).iterdir()
    if path.is_file() and path.read_bytes().startswith((b"#!/usr/bin/env bash", b"# shellcheck"))
)
_PATH = re.compile(r"(?<![\w./$])(?:benchmarks|scripts|tests|src)(?:/[\w-]+)+\.(?:py|sh)\b")


def test_everything_that_programs_import_is_there() -> None:
    found = [said for path in PROGRAMS for said in problems(path, [path.parent, *SHARED])]
    assert len(PROGRAMS) > 60
    assert not found, "\n".join(found)


def test_everything_that_shell_scripts_name_is_there() -> None:
    assert {path.name for path in SHELL} >= {"gpu_check", "test-gpu", "gpu_parts.sh", "soak"}
    for path in SHELL:
        text = path.read_text()
        assert not list(missing_modules(text, path.name))
        named = _PATH.findall(text)
        assert not [name for name in named if not (ROOT / name).is_file()], path


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import c2cserve.nowhere", "no module c2cserve.nowhere"),
        ("from c2cserve.core.machine import Slce", "c2cserve.core.machine has no Slce"),
        ("import no_such_package", "no module no_such_package"),
        ("def f():\n    from report import reprt", "report has no reprt"),
        ("import subprocess\nrun = ['-m', 'c2cserve.cli.mian']", "c2cserve.cli.mian"),
    ],
)
def test_what_is_not_there_is_found(source: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(source)
    [found] = problems(path, [ROOT / "benchmarks"])
    assert says in found


@pytest.mark.parametrize(
    "source",
    [
        "from c2cserve.sim import world",
        "from c2cserve.core.machine import Slice as Part",
        "import cuda.bindings.driver",
        "from c2cserve.cli.commands import COMMANDS",
        "from report import report\nimport report",
    ],
)
def test_what_is_there_is_no_problem(source: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(source)
    assert not list(problems(path, [ROOT / "benchmarks"]))
