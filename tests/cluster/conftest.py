"""Real Ray clusters: only where the marker asks for them, since importing Ray takes seconds."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
sys.path.insert(0, str(_FOLDER))


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if "not cluster" in str(config.getoption("markexpr")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, before others are deselected by their marks."""
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.filterwarnings("default"))  # Ray's own


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
