"""What the comparison with other servers counts as a server's seconds, and its rows."""

import os
import subprocess
import sys

import pytest
from cpu_peers import medians, processor_s

SPIN = "import time\nwhile time.process_time() < 0.2: pass\nprint('spun', flush=True)\ninput()"


def test_processor_time_is_that_of_a_process_and_its_descendants() -> None:
    before = processor_s(os.getpid())
    child = [sys.executable, "-c", SPIN]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"spun\n"
        alone, whole = processor_s(process.pid), processor_s(os.getpid())
        process.kill()
    assert alone >= 0.2
    assert whole - before >= alone


def test_each_peer_has_its_median_beside_ours() -> None:
    [row] = medians({
        ("decode", 4, "llama"): [10.0, 30.0, 20.0], ("decode", 4, "c2cserve"): [60.0, 20.0, 40.0],
        ("decode", 4, "vllm"): [80.0],
    })  # fmt: skip
    assert (row["of"], row["size"], row["tokens_per_s"]) == ("decode", 4, 40.0)
    assert row["spread"] == [20.0, 60.0]
    assert (row["times_llama"], row["times_vllm"]) == (pytest.approx(2.0), pytest.approx(0.5))
