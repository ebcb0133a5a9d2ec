"""A benchmark that is killed leaves no server behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from catalogue_server import Server, exit_on_sigterm
exit_on_sigterm()
server = Server(Path("none"), Path(sys.argv[2]), [])
server._command = [sys.executable, "-c", "import time; time.sleep(600)"]
with server:
    print(server.pids[0], flush=True)
    time.sleep(600)
"""


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_benchmark_takes_its_server_with_it(tmp_path: Path, by: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert not ended(pid)
        os.kill(benchmark.pid, by)
        benchmark.wait(60)
    until_s = time.monotonic() + 60
    while not ended(pid):
        assert time.monotonic() < until_s
        time.sleep(0.02)
