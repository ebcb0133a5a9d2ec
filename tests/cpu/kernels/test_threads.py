"""The CPU kernels' thread pool: each part of a call runs once, before the call returns."""

import shutil
import subprocess
from pathlib import Path

import pytest

from c2cserve.kernels import build

SOURCES = (Path(__file__).parent / "pool_driver.cpp", build.HERE / "cpu" / "threads.cpp")


def driver(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler
    path = folder / "pool_driver"
    given = ["-std=c++17", "-O2", "-pthread", f"-I{build.HERE / 'cpu'}", *flags]
    subprocess.run([compiler, *given, *map(str, SOURCES), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driver(tmp_path_factory.mktemp("pool"))


def run(program: Path, threads: int, calls: int) -> str:
    command = [program, str(threads), str(calls), "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_each_part_of_each_call_runs_once(program: Path, threads: int) -> None:
    """Also with more threads than cores, where helpers are late for calls that are long over."""
    assert int(run(program, threads, 100_000)) > 100_000


@pytest.mark.slow
def test_nothing_races(tmp_path: Path) -> None:
    run(driver(tmp_path, "-fsanitize=thread", "-g"), 4, 20_000)
