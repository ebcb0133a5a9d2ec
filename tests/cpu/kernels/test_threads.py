"""The CPU kernels' thread pool: each part of a call runs once, before the call returns."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from c2cserve.kernels import build
from c2cserve.kernels.cpu_ops import CpuOps

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


def test_a_trace_says_when_threads_ended_each_call() -> None:
    ops, x, w = CpuOps(2), torch.ones(40, 512), torch.ones(600, 512, dtype=torch.bfloat16)

    def run() -> None:
        for _ in range(3):
            ops.linear(x, w)

    whole = ops.traced(run, 100)
    calls, parts, begin, end = len(whole), whole[:, 0], whole[:, 1], whole[:, 2]
    assert calls >= 3
    assert calls % 3 == 0
    assert (parts >= 2).all()
    assert (begin < end).all()
    assert (end[:-1] <= begin[1:]).all()
    began, ended = whole[:, 3::2], whole[:, 4::2]
    took = ended > 0
    assert took.any(1).all()
    assert ((begin[:, None] <= began) & (began <= ended) & (ended <= end[:, None]))[took].all()
    assert torch.equal(ops.traced(run, 2)[:, 0], parts[:2])  # no more than there is room for
    assert len(ops.traced(lambda: None, 2)) == 0


def test_a_trace_ends_with_what_it_follows() -> None:
    ops = CpuOps(2)

    def fail() -> None:
        raise RuntimeError("not traced")

    with pytest.raises(RuntimeError, match="not traced"):
        ops.traced(fail, 8)
    assert len(ops.traced(lambda: None, 8)) == 0
