import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_SHM = Path("/dev/shm")
_SHM_BYTES_MIN = 1 << 30


@pytest.fixture
def pool_dir(tmp_path: Path) -> Iterator[Path]:
    """Where segments go: shared memory as in real life, or a disk where there is too little of it
    (a container's default is 64 MiB). Nothing may be left in it."""
    roomy = os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free >= _SHM_BYTES_MIN
    directory = Path(tempfile.mkdtemp(prefix="c2cserve-test-", dir=_SHM if roomy else tmp_path))
    yield directory
    shutil.rmtree(directory)
