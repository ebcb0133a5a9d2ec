"""The usage log: a line of JSON for each request that was served, appended to a file.

A thread writes it, so a slow disk delays no request. If the disk is full, lines are lost. They are
counted, and the server's log says so; no request fails for it.
"""

import logging
import os
import queue
import threading
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from c2cserve.server.access.usage import UsageTotals, Used

log = logging.getLogger(__name__)

_WAITING_MAX = 10_000
"""Lines that may wait for the disk; further ones are lost."""
_AT_ONCE = 256
_CLOSE_S = 5.0
"""Time to write the remaining lines when the server ends."""
_MODE = 0o600
_Order = Literal["reopen", "close"]


class UsageLine(msgspec.Struct, frozen=True):
    """The line of one request, of which at least one choice reached a slice."""

    time: datetime
    """When it ended."""
    request_id: str
    key: str
    tenant: str
    model: str
    choices: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish: dict[str, int]
    """How its choices ended, and how many each way."""


class UsageLog:
    """The log and its writing thread. Used on the server's event loop."""

    def __init__(self, path: Path) -> None:
        """Open the file and start the thread. Raises OSError if the file cannot be appended to."""
        self._path = path
        self._queue: queue.Queue[UsageLine | _Order] = queue.Queue(_WAITING_MAX)
        self._encoder = msgspec.json.Encoder()
        self._file, self._torn = _open(path)
        self._dropped = 0
        """Lines for which the queue had no room."""
        self._behind = False
        self._unwritten = 0
        """Lines that the thread could not write."""
        self._failing = False
        self._thread = threading.Thread(target=self._write_all, name="usage-log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that are not in the file."""
        return self._dropped + self._unwritten

    def write(self, line: UsageLine) -> None:
        try:
            self._queue.put_nowait(line)
            self._behind = False
        except queue.Full:
            self._dropped += 1
            if not self._behind:
                self._behind = True
                log.error("%s: the disk is too slow, lines are lost", self._path)

    def reopen(self) -> None:
        """Open the file of this name again, because the old file was renamed (log rotation)."""
        try:
            self._queue.put_nowait("reopen")
        except queue.Full:
            log.error("%s: not opened again, the disk is too slow", self._path)

    def close(self) -> None:
        """Write the waiting lines. Blocks for a few seconds at most."""
        try:
            self._queue.put("close", timeout=_CLOSE_S)
        except queue.Full:
            log.error("%s: the last lines are lost, the disk is too slow", self._path)
            return
        self._thread.join(_CLOSE_S)

    # ---- the thread -----------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            lines, order = self._next()
            if lines:
                self._append(lines)
            if order == "close":
                os.close(self._file)
                return
            if order == "reopen":
                self._reopen()

    def _next(self) -> tuple[list[bytes], _Order | None]:
        """Wait for lines, and return those in the queue up to the next order, and that order."""
        lines, item = list[bytes](), self._queue.get()
        while True:
            if isinstance(item, str):
                return lines, item
            lines.append(self._encoder.encode(item) + b"\n")
            if len(lines) == _AT_ONCE:
                return lines, None
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return lines, None

    def _append(self, lines: list[bytes]) -> None:
        data = memoryview((b"\n" if self._torn else b"") + b"".join(lines))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            written = bytes(data[:done])
            whole = written.count(b"\n") - (self._torn and done > 0)
            if written:
                self._torn = not written.endswith(b"\n")
            self._unwritten += len(lines) - whole
            if not self._failing:
                self._failing = True
                log.error("%s: lines are lost: %s", self._path, error.strerror)
            return
        self._torn = False
        if self._failing:
            log.warning(
                "%s: usage is written again; %d lines were lost", self._path, self._unwritten
            )
            self._failing = False

    def _reopen(self) -> None:
        try:
            file, torn = _open(self._path)
        except OSError as error:
            log.error("%s: cannot be opened again: %s", self._path, error.strerror)
            return
        os.close(self._file)
        self._file, self._torn = file, torn


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether the file ends within a line because its writer was
    killed."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
    size = os.fstat(file).st_size
    return file, size > 0 and os.pread(file, 1, size - 1) != b"\n"


def sum_lines(path: Path) -> tuple[list[dict[str, object]], int]:
    """Return the file's usage per key and model, and the number of broken lines, which a full disk
    or a killed server leaves. Raises OSError."""
    usage, broken = UsageTotals(), 0
    decode = msgspec.json.Decoder(UsageLine).decode
    with path.open("rb") as file:
        for text in file:
            try:
                line = decode(text)
            except (msgspec.MsgspecError, UnicodeError):
                broken += 1
                continue
            used = Used(1, line.prompt_tokens, line.cached_tokens, line.output_tokens)
            usage.add(line.key, line.tenant, line.model, used)
    return usage.rows(), broken
