"""A simulation's record: the streams of a server's, for the dashboard.

Its policies are the preset's, so `runtime.replay` cannot build them from the file."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from c2cserve.core.machine import Slice
from c2cserve.runtime.ports import Recorder
from c2cserve.runtime.record import Record, no_record
from c2cserve.runtime.replay import SIMULATED

Recorders = Callable[[Slice | None], Recorder[Any, Any]]
"""Makes the recorder of a slice's next life, or of the controller (None)."""


def no_recorders(_: Slice | None) -> Recorder[Any, Any]:
    return no_record


class RecordFile:
    """The record of one simulation, in one file. An older file of this name is replaced."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        path.unlink(missing_ok=True)
        self._path = path
        self._lives: Counter[str] = Counter()
        self._open: list[Record] = []

    def __call__(self, slice_: Slice | None) -> Recorder[Any, Any]:
        """Begin a stream. Raises OSError."""
        if slice_ is None:
            record = Record(self._path, "controller", f"{SIMULATED} cluster", {})
        else:
            self._lives[slice_.id] += 1
            stream = f"{slice_.id}/{self._lives[slice_.id]}"
            record = Record(self._path, stream, f"{SIMULATED} slice", {"slice": slice_})
        self._open.append(record)
        return record

    def close(self) -> None:
        for record in self._open:
            record.close()
