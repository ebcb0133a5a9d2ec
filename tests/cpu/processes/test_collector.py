"""The garbage collector of processes that serve requests."""

import subprocess
import sys

_PROGRAM = """
import gc
from c2cserve.processes.collector import collect_rarely

def visits():
    return [generation["collections"] for generation in gc.get_stats()]

collect_rarely()
before, frozen = visits(), gc.get_freeze_count()
held = [[] for _ in range(10_000)]
assert visits() == before, (before, visits())
for _ in range(100_000):
    cycle = []
    cycle.append(cycle)
assert visits()[0] > before[0], "cycles are never freed"
assert sum(isinstance(one, list) for one in gc.get_objects()) < 60_000
print("frozen" if frozen > 1_000 else frozen)
"""


def test_what_a_process_holds_for_its_requests_is_not_visited_again_and_again() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "frozen"), ran.stderr
