"""Notification of a thread that waits for messages that a transfer is over."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from c2cserve.transfer.engine import Ticket, TransferEngine, TransferError


class TicketNotifier:
    """Calls `notify` once after each ticket, in order. Its thread ends with the process."""

    def __init__(self, engine: TransferEngine, notify: Callable[[], None]) -> None:
        """`notify`: callable from any thread."""
        self._engine = engine
        self._notify = notify
        self._tickets: SimpleQueue[Ticket] = SimpleQueue()
        threading.Thread(target=self._watch, name="ticket-notifier", daemon=True).start()

    def watch(self, ticket: Ticket) -> None:
        """Notify when a transfer is over, however it ends."""
        self._tickets.put(ticket)

    def _watch(self) -> None:
        while True:
            ticket = self._tickets.get()
            with suppress(TransferError):  # the submitter's next look at the ticket raises it
                self._engine.wait(ticket, spins=False)
            self._notify()
            del ticket  # until the next one comes, nothing of it is held
