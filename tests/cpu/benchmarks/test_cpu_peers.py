"""What the comparison with llama.cpp counts as a server's seconds."""

import os
import subprocess
import sys

from cpu_peers import processor_s

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
