"""A simulation's record: the streams of a server's, for the dashboard.

Where slices are as a server's, so are all policies, and `runtime.replay` builds them from the file.
Else they decide several steps at once, or have profiles, which it cannot build."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from c2cserve.core.machine import Slice
from c2cserve.core.policy_names import OWN
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.slice.strategies import live_steps_in_flight
from c2cserve.runtime.ports import Recorder, no_record
from c2cserve.runtime.record import Record
from c2cserve.runtime.replay import SIMULATED

Recorders = Callable[[Slice | None], Recorder[Any, Any]]
"""Makes the recorder of a slice's next life, or of the controller (None)."""


def no_recorders(_: Slice | None) -> Recorder[Any, Any]:
    return no_record


class RecordFile:
    """The record of one simulation, in one file. An older file of this name is replaced."""

    def __init__(
        self, path: Path, server: AdmissionSettings | None = None, policy: str = OWN
    ) -> None:
        """`server`: the settings of a server's policies, where the simulation has these. `policy`:
        their name. Raises OSError."""
        self._policy = policy
        path.unlink(missing_ok=True)
        self._path = path
        self._server = server
        self._lives: Counter[str] = Counter()
        self._open: list[Record] = []

    def __call__(self, slice_: Slice | None) -> Recorder[Any, Any]:
        """Begin a stream. Raises OSError."""
        made = "" if self._server is not None else f"{SIMULATED} "
        if slice_ is None:
            settings = {} if self._server is None else {"settings": self._server}
            arguments: dict[str, Any] = {**settings, "policy": self._policy}
            record = Record(self._path, "controller", f"{made}cluster", arguments)
        else:
            self._lives[slice_.id] += 1
            stream = f"{slice_.id}/{self._lives[slice_.id]}"
            most = live_steps_in_flight(slice_)
            arguments = {"slice": slice_, "max_in_flight": most, "policy": self._policy}
            record = Record(self._path, stream, f"{made}slice", arguments)
        self._open.append(record)
        return record

    def close(self) -> None:
        for record in self._open:
            record.close()
