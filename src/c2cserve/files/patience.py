"""Opening files in a process that may be out of descriptors for a moment."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

_WAIT_S = 10.0
"""A lack of descriptors is seldom longer, because connections close all the time."""
_RETRY_S = 0.05


def open_patiently(
    open_: Callable[[], T], gave_up: Callable[[], bool] = lambda: False, wait_s: float = _WAIT_S
) -> T:
    """Return the result of `open_`, trying again while the process lacks file descriptors. Raises
    its OSError for another fault, after `wait_s`, or once `gave_up` returns true."""
    deadline_s = time.monotonic() + wait_s
    waiting = False
    while True:
        try:
            return open_()
        except OSError as error:
            lacking = error.errno in (errno.EMFILE, errno.ENFILE)
            if not lacking or gave_up() or time.monotonic() >= deadline_s:
                raise
            if not waiting:
                log.warning("waiting for file descriptors: %s", error)
        waiting = True
        time.sleep(_RETRY_S)
