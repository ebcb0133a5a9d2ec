"""The transfer engine: moves bytes between host memory and GPUs over all links, in stream order.

    caller      submit ─▶ ticket ......................... poll, wait, cancel
    stream      | before |   held, if asked for ...........| after |
    thread               add, pull ─▶ start  ◀─ over? ─▶ pull ...  release
    links                      | task | task | task | ... |

A transfer begins when all that its stream had before it is over. With `hold`, what the stream is
given afterwards begins when the transfer is over. Small transfers are one copy on the caller's
stream, with the order that CUDA gives it.

One thread feeds all links. It sleeps unless a micro-task ends, a transfer comes or a relay is late.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from c2cserve.transfer.moves import Piece, Port, Segment, bytes_of, cut
from c2cserve.transfer.schedule import LinkCounts, Outstanding, Schedule, State, Transfer
from c2cserve.transfer.settings import Settings
from c2cserve.transfer.wake import Wake

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
StreamT = TypeVar("StreamT", contravariant=True)


class LinkError(RuntimeError):
    """A link failed. The message has the driver's error."""


class TransferError(RuntimeError):
    """A transfer failed: its target has any bytes. What was computed from them is wrong."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Return whether everything before it is over."""
        ...

    def synchronize(self) -> object: ...


class Links(Protocol[StreamT]):
    """The links of a machine (`transfer.gpu.links` has those of GPUs).

    `start`, `is_over`, `recall` and `is_harmless` are called by the engine's thread only. All
    methods raise `LinkError`.
    """

    @property
    def wake(self) -> Wake:
        """Posted whenever a micro-task is over."""
        ...

    @property
    def pieces_max(self) -> int:
        """Pieces of one micro-task, at most."""
        ...

    @property
    def relays(self) -> Mapping[Port, Sequence[Port]]:
        """All ports, each with those that its link can relay for."""
        ...

    def check(self, segments: Sequence[Segment]) -> None:
        """Raise ValueError for memory that the links cannot reach, as far as that is cheap to see.

        A relay that reads such memory would break its whole GPU for this process.
        """
        ...

    def start(self, one: Outstanding) -> None:
        """Begin to copy the pieces of a micro-task over the link `one.port`."""
        ...

    def is_over(self, one: Outstanding) -> bool:
        """Return whether it ended: with all bytes in place, unless it was recalled."""
        ...

    def recall(self, one: Outstanding) -> None:
        """Ask a relay to write nothing more. It will be over soon, if it is not stuck."""
        ...

    def is_harmless(self, one: Outstanding) -> bool:
        """Return whether a recalled relay has written nothing and never will."""
        ...

    def mark(self, stream: StreamT) -> Event:
        """Return an event after all that the stream has. `wake` is posted when it is over."""
        ...

    def hold(self, stream: StreamT) -> int:
        """Let what the stream is given from now on wait for `let_go` of the number returned."""
        ...

    def let_go(self, number: int) -> None: ...

    def copy(self, segments: Sequence[Segment], stream: StreamT | None, *, hold: bool) -> Event:
        """Copy on the direct path after all that the stream has. Return an event at the end.

        With `hold`, what the stream is given from now on comes after it.
        """
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One submission, for the methods of the engine that took it."""

    bytes: int
    transfer: Transfer
    segments: Sequence[Segment] = ()
    before: Event | None = None
    copied: Event | None = None
    """The end of a small transfer, which no queue has."""
    held: int | None = None
    over: threading.Event = field(default_factory=threading.Event)


class TransferEngine(Generic[StreamT]):
    """Moves bytes over the links that it is given. Thread-safe, except for `close`."""

    def __init__(self, links: Links[StreamT], settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._links = links
        self._schedule = Schedule(links.relays, links.relays, self.settings)
        self._inbox: deque[tuple[bool, Ticket]] = deque()
        """(whether it is cancelled, else submitted; ticket)"""
        self._gated: list[Ticket] = []
        """Those whose streams have not come to them."""
        self._tickets: dict[Transfer, Ticket] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="transfers", daemon=True)
        self._thread.start()

    def submit(
        self, segments: Sequence[Segment], stream: StreamT | None = None, *, hold: bool = False,
        background: bool = False,
    ) -> Ticket:  # fmt: skip
        """Move segments after all that `stream` has now, and return at once.

        No two segments may write the same byte, and none may read what another writes. With `hold`,
        all that the stream is given later comes after the transfer. While it is held, nothing may
        make CUDA wait for it (docs/transfers.md). Without a stream, the transfer begins at once.
        Transfers of the background take what others leave of the links.

        The memory has to stay until the ticket is over. Raises ValueError for a segment without a
        path and for host memory that is not pinned. Raises `LinkError`, and `TransferError` if the
        engine is closed or broken.
        """
        ports = {segment.port for segment in segments}
        if unreachable := ports - self._links.relays.keys():
            names = ", ".join(sorted(port.name for port in unreachable))
            raise ValueError(f"no path for {names}")
        size = bytes_of(segments)
        ticket = Ticket(size, Transfer(background), segments)
        if size <= self.settings.one_path_bytes and len(ports) <= 1 and not background:
            self._check_open()
            ticket.copied = self._links.copy(segments, stream, hold=hold)
            return ticket
        self._links.check(segments)
        with self._lock:  # `close` and a fault let go of every stream that was held before
            self._check_open()
            if stream is not None:
                ticket.before = self._links.mark(stream)
                ticket.held = self._links.hold(stream) if hold else None
            self._inbox.append((False, ticket))
        self._links.wake.post()
        return ticket

    def poll(self, ticket: Ticket) -> bool:
        """Return whether the transfer is over: done or cancelled. Raises `TransferError`."""
        over = ticket.over.is_set() if ticket.copied is None else _is_over(ticket.copied)
        if over and ticket.transfer.state == "failed":
            raise TransferError(str(ticket.transfer.fault)) from ticket.transfer.fault
        return over

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> bool:
        """Block until the transfer is over, or for `timeout_s`. Return whether it is over.

        Raises `TransferError`.
        """
        if ticket.copied is None:
            ticket.over.wait(timeout_s)
        elif timeout_s is None:
            _synchronize(ticket.copied)
        else:
            until_s = time.monotonic() + timeout_s
            while not self.poll(ticket) and time.monotonic() < until_s:
                time.sleep(1e-4)
        return self.poll(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Move no more of a transfer than what is under way. It is over soon, not at once.

        The target may have any of the bytes. A transfer that is a single copy is not cancelled.
        """
        if ticket.copied is None:
            self._inbox.append((True, ticket))
            self._links.wake.post()

    def state(self, ticket: Ticket) -> State:
        """Return how the transfer is, or how it ended."""
        if not self.poll(ticket):
            return "moving"
        return "done" if ticket.copied is not None else ticket.transfer.state

    def counts(self) -> dict[str, LinkCounts]:
        """Return what each link has carried. The counts go on."""
        schedule = self._schedule
        return {port.name: schedule.counts(port) for port in schedule.ports}

    def close(self) -> None:
        """Cancel all transfers, and end the thread. No stream stays held.

        Raises `TransferError` if a copy does not end, and leaves its memory alone then.
        """
        with self._lock:
            self._closed = True
        self._links.wake.post()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise TransferError(f"a copy has not ended for {_CLOSE_S:.0f} s")
        self._links.close()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise TransferError("the transfer engine has failed") from self._broken
        if self._closed:
            raise TransferError("the transfer engine is closed")

    # ---- the engine's thread --------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not (self._closed and self._is_idle()):
                self._links.wake.wait(self._schedule.wakes_at(time.monotonic()))
                self._turn()
        except BaseException as fault:
            self._break(fault)
            raise

    def _is_idle(self) -> bool:
        return not (self._inbox or self._gated or self._tickets or self._schedule.busy)

    def _turn(self) -> None:
        self._read_inbox()
        self._admit()
        if self._closed:
            for ticket in [*self._gated, *self._tickets.values()]:
                self._cancel(ticket)
        self._collect()
        self._recall()
        self._feed()
        self._finish()

    def _read_inbox(self) -> None:
        while self._inbox:
            cancelled, ticket = self._inbox.popleft()
            if cancelled:
                self._cancel(ticket)
            else:
                self._gated.append(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket in self._gated:
            self._gated.remove(ticket)
            self._tickets[ticket.transfer] = ticket
        if not ticket.over.is_set():
            self._schedule.cancel(ticket.transfer)

    def _admit(self) -> None:
        """Queue the transfers whose streams have come to them."""
        gated: list[Ticket] = []
        for ticket in self._gated:
            try:
                ready = ticket.before is None or ticket.before.query()
            except RuntimeError as fault:  # CUDA's: the stream of the caller is broken
                self._refuse(ticket, fault)
                continue
            if not ready:
                gated.append(ticket)
                continue
            self._tickets[ticket.transfer] = ticket
            self._schedule.add(ticket.transfer, self._tasks(ticket.segments))
        self._gated = gated

    def _tasks(self, segments: Sequence[Segment]) -> Iterator[tuple[Port, tuple[Piece, ...]]]:
        ports: dict[Port, list[Segment]] = {}
        for segment in segments:
            ports.setdefault(segment.port, []).append(segment)
        for port, mine in ports.items():
            yield from cut(mine, self.settings.task_bytes_of(port), self._links.pieces_max)

    def _refuse(self, ticket: Ticket, fault: Exception) -> None:
        ticket.transfer.state, ticket.transfer.fault = "failed", fault
        self._let_go(ticket)

    def _collect(self) -> None:
        now = time.monotonic()
        for port in self._schedule.active():
            for one in tuple(self._schedule.outstanding(port)):
                try:
                    if self._links.is_over(one):
                        self._schedule.arrived(one, now)
                    elif one.recalled and not one.given_up and self._links.is_harmless(one):
                        self._schedule.give_up(one)
                except LinkError as fault:
                    self._fail(one, fault)

    def _recall(self) -> None:
        for one in self._schedule.stalled(time.monotonic()):
            log.warning("%s is late with a relay, and relays no more for a while", one.port.name)
            try:
                self._links.recall(one)
            except LinkError as fault:
                self._fail(one, fault)

    def _feed(self) -> None:
        for port in self._schedule.carriers():
            while (one := self._schedule.pull(port, time.monotonic())) is not None:
                try:
                    self._links.start(one)
                except LinkError as fault:
                    self._fail(one, fault)

    def _fail(self, one: Outstanding, fault: LinkError) -> None:
        if one.relayed:
            log.warning("%s relays no more: %s", one.port.name, fault)
        self._schedule.failed(one, fault)

    def _finish(self) -> None:
        for transfer in self._schedule.over:
            self._let_go(self._tickets.pop(transfer))
        self._schedule.over.clear()

    def _let_go(self, ticket: Ticket) -> None:
        if ticket.held is not None:
            self._links.let_go(ticket.held)
            ticket.held = None
        ticket.segments = ()
        ticket.over.set()

    def _break(self, fault: BaseException) -> None:
        """Fail every transfer: a stream that stays held would hang its GPU."""
        with self._lock:
            self._broken = fault
            mine = [ticket for _, ticket in self._inbox]
            for ticket in {*mine, *self._gated, *self._tickets.values()}:
                if not ticket.over.is_set():
                    self._refuse(ticket, TransferError(f"the transfer engine has failed: {fault}"))


def _is_over(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError as fault:
        raise TransferError(str(fault)) from fault


def _synchronize(event: Event) -> None:
    try:
        event.synchronize()
    except RuntimeError as fault:
        raise TransferError(str(fault)) from fault


AnyEngine = TransferEngine[Any]
