"""Processes that end with their parent, however it ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

from c2cserve.processes.parent_death import end_with_parent

_ENDS_S = 30
_PARENT = """
import signal, subprocess, sys, time
from functools import partial
from c2cserve.processes.parent_death import end_with_parent
child = subprocess.Popen(
    ["sleep", "600"], preexec_fn=partial(end_with_parent, signal.Signals(int(sys.argv[1])))
)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_when_its_parent_is_killed(by: signal.Signals) -> None:
    command = [sys.executable, "-c", _PARENT, str(int(by))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert select.select([child], [], [], 0)[0] == [], "it lives"
            parent.kill()
            assert select.select([child], [], [], _ENDS_S)[0] == [child]
        finally:
            os.close(child)


def test_a_signal_that_there_is_not_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        end_with_parent(1000)  # pyright: ignore[reportArgumentType]


_ANCESTOR = """
import subprocess, sys
from c2cserve.processes.parent_death import kill_descendants_at_exit
kill_descendants_at_exit()
# A shell that starts a process in a session of its own, and ends before it.
shell = ["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"]
print(subprocess.run(shell, stdout=subprocess.PIPE, text=True).stdout, flush=True)
sys.stdin.read()
"""


def test_no_descendant_outlives_a_process_that_exits() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ANCESTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as ancestor:
        assert ancestor.stdin is not None
        assert ancestor.stdout is not None
        orphan = os.pidfd_open(int(ancestor.stdout.readline()))
        try:
            assert select.select([orphan], [], [], 0)[0] == [], "it lives"
            ancestor.stdin.close()
            assert select.select([orphan], [], [], _ENDS_S)[0] == [orphan]
        finally:
            os.close(orphan)
