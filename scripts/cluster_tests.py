"""Run the tests on a real Ray cluster of three nodes on this machine, and leave nothing behind.

python scripts/cluster_tests.py [--limit SECONDS] [ARGUMENTS OF PYTEST]

As with the fast tests, what fails runs once more and is shown as such: nodes and Ray share the
cores with whatever runs beside. Ray's files and the tests' own lie in one folder, which is removed.
Whatever the tests started ends with them, also after the limit: orphans become children of this
process (a "subreaper", prctl(2)).
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
_LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
_PR_SET_CHILD_SUBREAPER = 36
_FAILED, _TIMED_OUT = 1, 124
_GRACE_S = 5.0
"""How long pytest has after the limit, to say what it was at."""


def run(args: Sequence[str], folder: Path, limit_s: float) -> int:
    """Run the tests. Return pytest's status, or 124 after the limit."""
    env = {**os.environ, "RAY_TMPDIR": str(folder), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "pytest", "--tb=short", "tests/cluster", *args]
    with subprocess.Popen(command, cwd=ROOT, env=env) as tests:
        try:
            return tests.wait(limit_s)
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)
            try:
                tests.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                tests.kill()
            return _TIMED_OUT
        finally:
            end_descendants()


def end_descendants() -> None:
    """Kill what is left under this process, until nothing is."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of it")
    own, args = parser.parse_known_args()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    marked = [] if "-m" in args else ["-m", "cluster and not slow"]
    _LAST_FAILED.unlink(missing_ok=True)
    end_s = time.monotonic() + own.limit
    # The paths of Ray's sockets may have 107 bytes: its folder's name is short.
    with tempfile.TemporaryDirectory(prefix="c2c-", ignore_cleanup_errors=True) as name:
        status = run([*marked, *args], Path(name), own.limit)
        if status == _FAILED and _LAST_FAILED.exists():
            print("FLAKY OR BROKEN: these tests of a cluster failed, and now run once more:")
            left_s = max(1.0, end_s - time.monotonic())
            status = run([*marked, *args, "--last-failed"], Path(name), left_s)
    if status == _TIMED_OUT:
        print(f"the tests of a cluster took longer than {own.limit:g} s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
