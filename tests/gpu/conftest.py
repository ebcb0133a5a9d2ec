"""Real kernels on real GPUs: `pytest -m gpu tests/gpu` on a machine that has one, or two."""

from collections.abc import Iterator

import pytest
import torch

from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.launch_context import LaunchContext


@pytest.fixture(scope="session")
def repository() -> Repository:
    return Repository(0)


@pytest.fixture(scope="session")
def context(repository: Repository) -> Iterator[LaunchContext]:
    yield LaunchContext(0, repository)
    torch.cuda.synchronize()
