"""What signals do before the event loop handles them.

A start reads checkpoints and may download some, which can take hours. As the first process of a
container, a program that handles no SIGTERM is not even ended by it.
"""

import signal
from typing import NoReturn


class Stopped(SystemExit):
    """A signal ended the start. The exit status is 0, as after a drain."""

    def __init__(self) -> None:
        super().__init__(0)


class StartSignals:
    """The handlers of SIGTERM, SIGINT and SIGHUP until `LiveServer` sets its own."""

    def __init__(self, *, reloads: bool) -> None:
        """`reloads`: SIGHUP asks the server to read files again. Otherwise it ends the server, as
        SIGTERM does, unless it is ignored (nohup)."""
        self.hung_up = False
        """SIGHUP has come, and its files are still to be read again."""
        self.ends_by_hang_up = not reloads and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        signal.signal(signal.SIGTERM, self._stop)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        if reloads:
            signal.signal(signal.SIGHUP, self._remember)
        elif self.ends_by_hang_up:
            signal.signal(signal.SIGHUP, self._stop)

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
