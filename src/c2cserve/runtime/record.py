"""The record: every tick of every loop, one JSON line each.

Several processes append to one file: each opens it with O_APPEND and writes a line in one `write`.
A *stream* is one loop's life (the controller, or one incarnation of a slice's worker). Its first
line says how to build its policy, so `runtime.replay` needs nothing but the file. A tick without
events and actions is recorded too: a policy may learn from time passing.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from c2cserve.runtime.ports import Recorder
from c2cserve.runtime.wire import tagged

log = logging.getLogger(__name__)

VERSION = 1


class Record:
    """The `runtime.ports.Recorder` of one stream. Serving outlives it: when a line cannot be
    written (the disk is full), an error is logged and the stream ends there."""

    def __init__(
        self, path: Path, stream: str, policy: str, arguments: Mapping[str, object]
    ) -> None:
        """`policy`: a name that `runtime.replay` knows. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._path = path
        self._fd: int | None = os.open(path, flags, 0o600)
        self._stream = stream
        self._encoder = msgspec.json.Encoder()
        self._write({"stream": stream, "v": VERSION, "policy": policy, "arguments": arguments})

    def __call__(self, now: float, events: Sequence[object], actions: Sequence[object]) -> None:
        if self._fd is not None:
            self._write(
                {
                    "stream": self._stream,
                    "now": now,
                    "events": tagged(events),
                    "actions": tagged(actions),
                }
            )

    def _write(self, line: Mapping[str, object]) -> None:
        assert self._fd is not None
        data = self._encoder.encode(line) + b"\n"
        try:
            whole = os.write(self._fd, data) == len(data)
        except OSError as error:
            log.error("%s: the record of %s ends: %s", self._path, self._stream, error.strerror)
            self.close()
        else:
            if not whole:
                log.error("%s: the record of %s ends: no room", self._path, self._stream)
                self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def both(first: Recorder[Any, Any], second: Recorder[Any, Any]) -> Recorder[Any, Any]:
    """Return a recorder that gives each tick to `first` and then to `second`."""

    def record(now: float, events: Sequence[object], actions: Sequence[object]) -> None:
        first(now, events, actions)
        second(now, events, actions)

    return record
