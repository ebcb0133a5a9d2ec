"""Programs whose copies are spread over the links of two GPUs give what they give without that.

`pytest -m gpu -s tests/gpu/test_multipath.py` prints what the library reports."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from multipath import LEAST, PROGRAM, run

from c2cserve.transfer.multipath import multipath_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour"),
]

SETTINGS = {LEAST: str(256 << 10)}
"""Copies of the random program have up to 4 MiB."""


@pytest.mark.parametrize("allocator", ["native", "expandable_segments:True"])
def test_10_000_random_operations_give_the_same_memory(allocator: str) -> None:
    """Also in memory that PyTorch maps itself, for one GPU."""
    compare(1, 10_000, PYTORCH_CUDA_ALLOC_CONF="" if allocator == "native" else allocator)


def compare(seed: int, operations: int, **variables: str) -> None:
    words = ("random", str(seed), str(operations))
    plain, spread = (
        run(*words, preloaded=preloaded, **SETTINGS, **variables) for preloaded in (False, True)
    )
    assert spread["sums"] == plain["sums"]
    assert spread["spread"] > 0
    assert plain["spread"] == 0


def test_small_copies_take_2_us_more_at_most() -> None:
    times = [run("small", preloaded=preloaded)["us"] for preloaded in (False, True)]
    assert times[1] - times[0] <= 2.0


def test_blocking_copies_of_memory_that_is_mapped_for_one_gpu() -> None:
    """vLLM's sleep mode makes these."""
    expected = {"steps": [0] * 6, "right": True}
    assert run("mapped", preloaded=False) == {**expected, "spread": 0}
    assert run("mapped", preloaded=True) == {**expected, "spread": 2}


def test_a_fork_changes_nothing_for_the_parent() -> None:
    assert run("forked", preloaded=True) == {"child": 0, "right": True}


def test_a_program_that_is_killed_leaves_both_gpus_well() -> None:
    """Also while relays run: a plain program has the right bytes afterwards."""
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, str(PROGRAM), "loop"], stdout=subprocess.PIPE, text=True,
            env=multipath_environment(os.environ),
        ) as program:  # fmt: skip
            assert program.stdout is not None
            assert program.stdout.readline() == "copies\n"
            program.send_signal(signal.SIGKILL)
    compare(3, 400)


@pytest.mark.parametrize("linked", ["shared", "static"])
def test_a_program_in_c_with_either_runtime(tmp_path: Path, linked: str) -> None:
    """The runtime library finds the driver in the same way, where it is a part of the program."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("there is no nvcc")
    program = tmp_path / "copies"
    source = Path(__file__).with_name("multipath_copies.cu")
    subprocess.run(
        [nvcc, "-O2", f"-cudart={linked}", str(source), "-o", str(program), "-ldl"], check=True,
        timeout=200,
    )  # fmt: skip
    environment = multipath_environment(os.environ, report=True)
    done = subprocess.run(
        [str(program)], env=environment, check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "4 of 4 right, 4 spread\n", done


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_memcheck_finds_nothing() -> None:
    command = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, str(PROGRAM)]
    environment = multipath_environment({**os.environ, **SETTINGS})
    done = subprocess.run(
        [*command, "random", "1", "200"], env=environment, timeout=280, check=False
    )
    assert done.returncode == 0
