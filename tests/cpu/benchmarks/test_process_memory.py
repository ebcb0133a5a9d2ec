"""What a server's processes hold of their own: pages that a fork shares are there once."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from process_memory import family, kind_of, own_bytes

_HELD, _FORKS = 64 << 20, 3
_PROGRAM = f"""
import os, sys
held = b"\\1" * {_HELD}
for _ in range({_FORKS}):
    if os.fork() == 0:
        break
else:
    print("forked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def forked() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        yield process


def test_pages_that_forks_share_count_once(forked: "subprocess.Popen[str]") -> None:
    pids = family(forked.pid)
    assert len(pids) == 1 + _FORKS
    assert _HELD < sum(own_bytes(pid) for pid in pids) < 2 * _HELD


def test_a_process_that_has_ended_holds_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert own_bytes(process.pid) == 0, "its status was not asked for yet"
    assert own_bytes(process.pid) == 0


def test_kinds_of_processes(forked: "subprocess.Popen[str]") -> None:
    first, *forks = family(forked.pid)
    workers = {forks[0]: "gpu0"}
    assert kind_of(first, first, workers) == "server"
    assert kind_of(forks[0], first, workers) == "worker/gpu0"
    assert kind_of(forks[1], first, workers) == "worker", "of a slice that is not up"
    assert kind_of(first, os.getpid(), workers) == "other"
