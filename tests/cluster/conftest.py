"""Real Ray clusters: only where the marker asks for them, since importing Ray takes seconds."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if "not cluster" in str(config.getoption("markexpr")) else None


@pytest.fixture(scope="session")
def machines() -> Iterator[object]:
    from ray_cluster import Machines

    with Machines(3) as started:
        yield started


@pytest.fixture(scope="session")
def front(machines: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from ray_cluster import Front, Machines

    assert isinstance(machines, Machines)
    directory = tmp_path_factory.mktemp("cluster") / "pool"
    with Front(machines.address, directory=directory) as started:
        started.wait_nodes(3)
        yield started
