import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import Served

from c2cserve.runtime.gateway import Refused


@pytest.fixture
def overloaded(served: Served) -> Iterator[Served]:
    served.gateway.overloaded = Refused(429, "it would come late", 7.2)
    yield served
    served.gateway.overloaded = None
