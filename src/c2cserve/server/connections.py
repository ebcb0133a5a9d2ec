"""All connections of the server: their number is bounded, and idle ones make way for new ones."""

import logging
import resource
import time
from collections import Counter, OrderedDict
from typing import Protocol

from c2cserve.core.log_limit import LogLimit
from c2cserve.server.settings import ConnectionLimits

log = logging.getLogger(__name__)

_RESERVE_SHARE = 4
_RESERVE_MAX = 1024

CLOSED = (
    "idle", "idle_for_room", "head_timeout", "body_timeout", "send_timeout", "full",
    "head_too_large", "body_too_large", "malformed",
)  # fmt: skip
"""Reasons why the server closes connections."""


class Closable(Protocol):
    """A connection that waits for a request and can be closed at once."""

    def make_way(self) -> None: ...


class Connections:
    """The open connections and their states. Used on the server's event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.open = 0
        self.closed: Counter[str] = Counter(dict.fromkeys(CLOSED, 0))
        self._idle: OrderedDict[Closable, None] = OrderedDict()
        """Connections without a byte of a request, those that have waited longest first."""
        self._begun: OrderedDict[Closable, None] = OrderedDict()
        """Connections with a part of a request's headers, in the same order."""
        self._log_limit = LogLimit()

    def enter(self) -> bool:
        """Count a new connection. Return False if there is no room: it must be closed then."""
        self.open += 1
        if self.open <= self.limits.connections:
            return True
        for waiting in (self._idle, self._begun):
            if waiting:
                connection, _ = waiting.popitem(last=False)
                connection.make_way()
                return True
        return False

    def leave(self, connection: Closable) -> None:
        self.open -= 1
        self.busy(connection)

    def idle(self, connection: Closable) -> None:
        self.busy(connection)
        self._idle[connection] = None

    def begun(self, connection: Closable) -> None:
        self.busy(connection)
        self._begun[connection] = None

    def busy(self, connection: Closable) -> None:
        self._idle.pop(connection, None)
        self._begun.pop(connection, None)

    def note(self, reason: str, client: object, request_id: str | None = None) -> None:
        """Count a connection that the server closes. Log at most one of them per second."""
        self.closed[reason] += 1
        if reason == "idle":
            return
        if (more := self._log_limit.more(time.monotonic())) is None:
            return
        log.info(
            "connection of %s closed: %s%s", client, reason, more,
            extra={"request_id": request_id, "reason": reason},
        )  # fmt: skip


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_within(wanted: int, files: int) -> int:
    """Return how many connections leave enough descriptors for workers, segments and text
    processes."""
    reserve = min(files // _RESERVE_SHARE, _RESERVE_MAX)
    allowed = max(1, files - reserve)
    if wanted > allowed:
        log.warning(
            "%d open files are allowed (ulimit -n): %d connections at once, not %d; raise it",
            files, allowed, wanted,
        )  # fmt: skip
    return min(wanted, allowed)
