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
