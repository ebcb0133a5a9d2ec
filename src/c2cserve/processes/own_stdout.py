"""A process's stdout for its own messages alone."""

import os
from typing import BinaryIO


def own_stdout() -> BinaryIO:
    """Return a file that writes to stdout; what else writes there goes to stderr from now on.

    Libraries print to stdout, from C++ too. Call this before they are imported."""
    file = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return file
