import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_process import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One undisturbed server with the specialists, for tests that only talk to it: who adds a model
    removes it. Its workers may be stopped for a while."""
    directory = tmp_path_factory.mktemp("e2e") / "pool"
    with ServerProcess(directory=directory) as process:
        yield process
