"""One worker's vital signs and counters, in a small page of shared memory. The worker writes it and
the controller reads it, without messages.

A worker that computes cannot answer, and a stopped worker cannot either. The page tells the two
apart, because a thread of the worker writes the time into it while the step runs. All values are
float64. A reader may see values of two neighbouring moments, never a torn number.
"""

import mmap
import os
from enum import IntEnum
from pathlib import Path
from typing import Any

from c2cserve.runtime.slice_stats import STATS, SliceStats, Stat, StatSource


class Field(IntEnum):
    """Vital signs. They lie before the values of `SliceStats`."""

    BEAT_S = 0
    """The time of the last sign of life, by CLOCK_MONOTONIC (one clock for all processes)."""
    STEP_STARTED_S = 1
    """The time when the present step began; 0 while no step computes."""
    PROGRESS_S = 2
    """The time when a step was last completed, or when the slice last had no work."""
    BUSY_S = 3
    """Seconds spent in steps since the worker's start."""
    LAST_MODEL = 4
    """Index into the order in which models were attached to this incarnation; -1: none yet."""


_INDEX = {stat.name: len(Field) + i for i, stat in enumerate(STATS)}
_BY_SOURCE = {
    source: [(stat.name, _INDEX[stat.name]) for stat in STATS if stat.source is source]
    for source in StatSource
}
_BYTES = (len(Field) + len(STATS)) * 8


class StatusPage:
    """The page of one worker. The controller creates it and the worker opens it."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Create or open the page. Raises OSError, also when the filesystem is full, and then
        leaves no file behind."""
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                # Allocate now: a full filesystem is an error here, not SIGBUS at the first access.
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

    def add_stat(self, name: str, amount: float) -> None:
        """Add to the counter of this name. Raises KeyError if the table has none."""
        self._fields[_INDEX[name]] += amount

    def write_stats(self, stats: SliceStats, source: StatSource) -> None:
        """Write the values that come from `source`; the others stay as they are."""
        for name, index in _BY_SOURCE[source]:
            self._fields[index] = getattr(stats, name)

    def stat(self, name: str) -> int:
        """Read one value. Raises KeyError if the table has none of this name."""
        return int(self._fields[_INDEX[name]])

    @property
    def has_requests(self) -> bool:
        return bool(self.stat("running") or self.stat("waiting"))

    def stats(self) -> SliceStats:
        return SliceStats(**{stat.name: self._value(stat) for stat in STATS})

    def _value(self, stat: Stat) -> Any:
        """All rows are whole numbers but those in seconds."""
        value = self._fields[_INDEX[stat.name]]
        return value if stat.unit == "seconds" else int(value)

    def remove(self) -> None:
        """Remove the file. The mapping ends with its last reader: another thread may be taking a
        snapshot of it right now."""
        self.path.unlink(missing_ok=True)
