"""One worker's vital signs, in a small shared-memory page: written there, read here, no messages.

A worker that computes can not answer, one that is stopped can not either; the page tells the two
apart, because a thread of the worker writes the time into it while the step runs. All fields are
float64; a reader may see fields of two neighbouring moments, never a torn number.
"""

import mmap
import os
from enum import IntEnum
from pathlib import Path


class Field(IntEnum):
    BEAT_S = 0
    """CLOCK_MONOTONIC (one clock for all processes of a machine) of the last sign of life."""
    STEP_STARTED_S = 1
    """When the step that now computes began; 0 while none does."""
    BUSY_S = 2
    STEPS = 3
    SWITCHES = 4
    RUNNING = 5
    WAITING = 6
    KV_USED_BYTES = 7
    PROMPT_TOKENS = 8
    OUTPUT_TOKENS = 9
    CACHED_TOKENS = 10
    PREEMPTIONS = 11
    LAST_MODEL = 12
    """Index into the order in which models were attached to this incarnation; -1: none yet."""
    WEIGHTS_KEPT_BYTES = 13
    WEIGHTS_HIT_BYTES = 14
    WEIGHTS_STREAMED_BYTES = 15
    GRAPH_STEPS = 16
    WEIGHTS_LENT_BYTES = 17
    WEIGHTS_PEER_BYTES = 18
    KV_HOST_BYTES = 19
    KV_OUT_BYTES = 20
    KV_IN_BYTES = 21
    FLASH_STEPS = 22
    FLASH_MISSED_STEPS = 23
    STEP_FAILURES = 24
    STEP_RETRIES = 25
    RETRIES_FAILED = 26
    PARTS_REBUILT = 27
    PROGRESS_S = 28
    """When a step was last done, or the slice had none to do."""
    GRAPH_CAPTURES = 29
    GRAPH_CAPTURE_FAILURES = 30
    GRAPHS_DROPPED = 31


_BYTES = len(Field) * 8


class StatusPage:
    """Created by the controller, opened by the worker."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Raises OSError, also when the filesystem is full; nothing is left behind then."""
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                # The memory now: a full filesystem is an error here, not SIGBUS at the first touch.
                os.posix_fallocate(fd, 0, _BYTES)
            self._map = mmap.mmap(fd, _BYTES)
        except OSError:
            if create:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._fields = memoryview(self._map).cast("d")
        if create:
            self._fields[Field.LAST_MODEL] = -1.0

    def __getitem__(self, field: Field) -> float:
        return self._fields[field]

    def __setitem__(self, field: Field, value: float) -> None:
        self._fields[field] = value

    def add(self, field: Field, value: float) -> None:
        self._fields[field] += value

    def remove(self) -> None:
        """Remove the file. The mapping goes with the last reader: a snapshot may be taken of it
        on another thread right now."""
        self.path.unlink(missing_ok=True)
