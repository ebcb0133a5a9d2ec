import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("ray")

from ray_cluster import Front, Machines


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    with Machines(3) as started:
        yield started


@pytest.fixture(scope="session")
def front(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    directory = tmp_path_factory.mktemp("cluster") / "pool"
    with Front(machines.address, directory=directory) as started:
        started.wait_nodes(3)
        yield started
