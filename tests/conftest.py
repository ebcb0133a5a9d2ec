"""CI draws the same examples every time; elsewhere each run draws new ones (a find becomes a test
first). The fast tests draw a third of all (example_counts.py). How long one takes is no fault of
the code's where other processes have the cores.

Triton's kernels run interpreted where there is no GPU. They are what that is decided for when they
are imported, so it is decided here. So are torch's threads: one where tests run in several
processes, which have the cores between them. Each client of HTTP would load all authorities that
it trusts, which takes 25 ms: here it trusts none.

Tests of benchmarks and of the soak import them by name, and the soak imports what tests of servers
share."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from compiled_once import compile_once
from example_counts import examples
from hypothesis import HealthCheck, settings

_TESTS = Path(__file__).parent
sys.path += [str(_TESTS), str(_TESTS.parent / "benchmarks"), str(_TESTS / "e2e")]
sys.path.append(str(_TESTS.parent / "scripts" / "clients"))

settings.register_profile(
    "tests",
    deadline=None,
    max_examples=examples(100),
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(_TESTS)

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    several = config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if several and not sys.dont_write_bytecode:
        compile_once(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection imports and makes stays to the end: the collector need not visit it, neither
    meanwhile, for a third of collection's time, nor in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
