"""`c2cserve multipath`: what a program is started with."""

import subprocess
import sys
from pathlib import Path

import pytest

from c2cserve.kernels.native import LIBRARY_FOLDER
from c2cserve.transfer import multipath
from c2cserve.transfer.multipath import MultipathError, multipath_environment


def test_the_library_comes_before_what_was_preloaded() -> None:
    made = multipath_environment({"LD_PRELOAD": "other.so", "A": "b"})
    assert made["LD_PRELOAD"] == f"{LIBRARY_FOLDER}/libc2cserve_multipath.so:other.so"
    assert made["A"] == "b"
    assert not [name for name in made if "MULTIPATH" in name]


def test_options_are_variables() -> None:
    made = multipath_environment(
        {"CUDA_VISIBLE_DEVICES": "0,1"}, neighbours=2, least_bytes=5, report=True
    )
    options = {
        name.removeprefix("C2CSERVE_MULTIPATH_"): value
        for name, value in made.items()
        if name.startswith("C2CSERVE_MULTIPATH_")
    }
    assert options == {"NEIGHBOURS": "2", "LEAST_BYTES": "5", "REPORT": "1"}
    assert made["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_without_the_library_it_says_what_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipath, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(MultipathError, match="is not built"):
        multipath_environment({})


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "c2cserve.cli.main", "multipath", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_missing_command_is_one_clear_line() -> None:
    ran = run("--", "/no/such/program", "--option")
    assert ran.returncode == 1
    assert ran.stderr.startswith("c2cserve: ")
