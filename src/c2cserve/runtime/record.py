"""The record: every event and action of every loop, one JSON line per tick.

Several processes append to one file: each opens it with O_APPEND and writes a line in one `write`.
A *stream* is one loop's life (the controller, or one incarnation of a slice's worker). Its first
line says how to build its policy, so `runtime.replay` needs nothing but the file.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

VERSION = 1


class Record:
    """`runtime.ports.Recorder` for one stream. Ticks without events and actions leave no line."""

    def __init__(
        self, path: Path, stream: str, policy: str, arguments: Mapping[str, object]
    ) -> None:
        """`policy`: a name that `runtime.replay` knows. Raises OSError."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._stream = stream
        self._encoder = msgspec.json.Encoder()
        self._write({"stream": stream, "v": VERSION, "policy": policy, "arguments": arguments})

    def __call__(self, now: float, events: Sequence[object], actions: Sequence[object]) -> None:
        if events or actions:
            self._write(
                {
                    "stream": self._stream,
                    "now": now,
                    "events": [tagged(event) for event in events],
                    "actions": [tagged(action) for action in actions],
                }
            )

    def _write(self, line: Mapping[str, object]) -> None:
        os.write(self._fd, self._encoder.encode(line) + b"\n")


def no_record(now: float, events: Sequence[object], actions: Sequence[object]) -> None:
    """Nobody asked for one."""


def tagged(item: object) -> list[Any]:
    """An event or action with its type's name: unions of dataclasses need one."""
    return [type(item).__name__, item]
