"""What signals do before the event loop handles them.

A start reads checkpoints and may download some, which can take hours. As the first process of a
container, a program that handles no SIGTERM is not even ended by it.
"""

import contextlib
import os
import signal
from typing import NoReturn

from c2cserve.processes.parent_death import kill_descendants

_hung_up = False
"""SIGHUP has come while modules were imported."""


def end_imports_by_signals() -> None:
    """Set the handlers of SIGTERM, SIGINT and SIGHUP until there is a `StartSignals`: while a
    server's modules are imported. Signals that are ignored stay so.

    The handlers end the process, and the children that it has started. An exception would show
    where the import was, or would be caught there."""
    signal.signal(signal.SIGTERM, _stop_import)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_import)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _note_hang_up)


def _end(status: int) -> NoReturn:
    try:
        kill_descendants()
    finally:
        os._exit(status)


def _stop_import(*_: object) -> NoReturn:
    _end(0)


def _interrupt_import(*_: object) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, b"c2cserve: interrupted\n")
    _end(130)


def _note_hang_up(*_: object) -> None:
    global _hung_up  # noqa: PLW0603 - what it means depends on options that are not read yet
    _hung_up = True


class Stopped(SystemExit):
    """A signal ended the start. The exit status is 0, as after a drain."""

    def __init__(self) -> None:
        super().__init__(0)


class StartSignals:
    """The handlers of SIGTERM, SIGINT and SIGHUP until `LiveServer` sets its own."""

    def __init__(self, *, reloads: bool) -> None:
        """`reloads`: SIGHUP asks the server to read files again. Otherwise it ends the server, as
        SIGTERM does, unless it is ignored (nohup). Raises Stopped if it was to end the server
        and has come already."""
        self.hung_up = reloads and _hung_up
        """SIGHUP has come, and its files are still to be read again."""
        self.ends_by_hang_up = not reloads and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        self.interrupted = False
        """SIGINT has ended the server before it could answer anything."""
        signal.signal(signal.SIGTERM, self._stop)
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _interrupt_import):
            signal.signal(signal.SIGINT, self._interrupt)
        if reloads:
            signal.signal(signal.SIGHUP, self._remember)
        elif self.ends_by_hang_up:
            signal.signal(signal.SIGHUP, self._stop)
            if _hung_up:
                raise Stopped

    @staticmethod
    def _stop(*_: object) -> NoReturn:
        raise Stopped

    @staticmethod
    def _interrupt(*_: object) -> NoReturn:
        """Raise at once, like Python's own handler. asyncio replaces that one by a cancellation,
        which a start would notice at its end only."""
        raise KeyboardInterrupt

    def _remember(self, *_: object) -> None:
        self.hung_up = True
