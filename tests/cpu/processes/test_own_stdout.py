"""What libraries print cannot come between a process's own messages."""

import os
import subprocess
import sys

_CODE = """
import os, sys
from c2cserve.processes.own_stdout import own_stdout
out = own_stdout()
print("a library", flush=True)
os.write(1, b"in C")
out.write(b"message")
"""
_CHILD = "from c2cserve.processes.parent_death import end_with; end_with({parent}); print('lives')"


def test_prints_go_to_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, check=True)
    assert done.stdout == b"message"
    assert done.stderr == b"a library\nin C"


def test_a_process_whose_parent_is_gone_ends_at_once() -> None:
    for parent, status in ((os.getpid(), 0), (1 << 30, 1)):
        child = subprocess.run(
            [sys.executable, "-c", _CHILD.format(parent=parent)], capture_output=True, check=False
        )
        assert child.returncode == status
