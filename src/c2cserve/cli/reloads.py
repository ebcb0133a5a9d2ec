"""What SIGHUP has the server read again."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class ReloadError(Exception):
    """Something cannot be read again; what was read before stays in use. The message says why."""


class Reloads:
    """One list for the signal: each part is read again, whatever becomes of the others."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, what: str, read: Callable[[], None]) -> None:
        """`read` raises ReloadError."""
        self._parts[what] = read

    def run(self) -> None:
        """Read all of it again, on the server's event loop."""
        for what, read in self._parts.items():
            try:
                read()
            except ReloadError as error:
                log.error("SIGHUP: %s: %s; the server goes on with what it has", what, error)
            else:
                log.info("SIGHUP: %s: read again", what)
