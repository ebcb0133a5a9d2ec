"""What the engine's thread sleeps on: a semaphore that CUDA can post without the interpreter.

The driver calls host functions on a thread of its own, in stream order. Such a function is the C
library's `sem_post`, whose only parameter is the semaphore. So a micro-task that ends wakes the
engine, and neither a thread per link nor the interpreter's lock is needed for it.
"""

import ctypes
import errno
import math
import os
import time

_SEMAPHORE_BYTES = 64
"""No less than `sem_t` has on any platform."""
_MONOTONIC = 1
"""CLOCK_MONOTONIC of Linux."""
_SLEEP_MAX_S = 3600.0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Wake:
    """Counts posts, and lets one thread wait for them."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._libc.sem_trywait.argtypes = (ctypes.c_void_p,)
        self._libc.sem_post.argtypes = (ctypes.c_void_p,)
        self._libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        self._libc.malloc.restype = ctypes.c_void_p
        # Never freed: a host function that is still enqueued may post after this object is gone,
        # and after the interpreter is.
        self.semaphore: int = self._libc.malloc(_SEMAPHORE_BYTES)
        """The argument of `function`."""
        self._check(self._libc.sem_init(self.semaphore, 0, 0))
        self.function = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value or 0
        """The address of a function that posts."""

    def post(self) -> None:
        self._check(self._libc.sem_post(self.semaphore))

    def wait(self, until_s: float = math.inf) -> bool:
        """Sleep until there was a post since the last call, or until `until_s` (monotonic clock).

        Return whether there was one. All posts so far count as one.
        """
        until_s = min(until_s, time.monotonic() + _SLEEP_MAX_S)
        seconds = int(max(0.0, until_s))
        limit = _Timespec(seconds, int(1e9 * max(0.0, until_s - seconds)))
        posted = self._libc.sem_clockwait(self.semaphore, _MONOTONIC, ctypes.byref(limit)) == 0
        if not posted and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            self._check(-1)
        while self._libc.sem_trywait(self.semaphore) == 0:
            posted = True
        return posted

    def _check(self, result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
