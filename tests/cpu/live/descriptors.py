"""A process that can open nothing."""

import contextlib
import resource
from collections.abc import Generator


@contextlib.contextmanager
def no_descriptors() -> Generator[None]:
    """Nothing can be opened inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
