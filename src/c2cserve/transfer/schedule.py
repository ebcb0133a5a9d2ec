"""Which link carries which micro-task, and when: the scheduler of the transfer engine.

    submitted ─▶ queue of its port ─▶ pulled by a link ─▶ outstanding ─▶ arrived
                   ▲                   direct: the port's own         │
                   │                   relay: another GPU's           │ error or stall of a relay
                   └──────────────────────────────────────────────────┘

Each port has a queue of micro-tasks, and is itself a link that carries them. A link pulls when it
has fewer outstanding micro-tasks than its depth, so a congested link pulls less. It takes what is
in its own queue first: that path is direct. Else it relays for another GPU.

Nothing here waits, copies or reads a clock. Method (MMA, 3.4): queues for each destination,
outstanding queues of fixed depth for each link, direct path first, longest queue first.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from c2cserve.core.backoff import back_off_s
from c2cserve.transfer.moves import Piece, Port
from c2cserve.transfer.settings import Settings

State = Literal["moving", "done", "cancelled", "failed"]

_PAUSE_MOST = 64
"""Times the first one: the longest pause of a link whose relays stall again and again."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The bytes of one submission."""

    background: bool = False
    state: State = "moving"
    fault: Exception | None = None
    waiting: int = 0
    """Micro-tasks in queues."""
    carried: int = 0
    """Micro-tasks outstanding, without those that are known to write nothing more."""

    @property
    def over(self) -> bool:
        """Whether nothing of it is moved any more, nor will be."""
        return not self.waiting and not self.carried


@dataclass(slots=True, eq=False)
class MicroTask:
    transfer: Transfer
    port: Port
    """The port of the direct path."""
    pieces: tuple[Piece, ...]
    size: int


@dataclass(slots=True, eq=False)
class Outstanding:
    """A micro-task on a link. It keeps one of the link's slots until it is `released`."""

    port: Port
    """The link that carries it."""
    slot: int
    """Below the depth for direct paths, and as many from there for relays."""
    task: MicroTask
    since_s: float
    late_s: float
    """When a relay is recalled."""
    relayed: bool
    """The link is another GPU's than the one that the bytes go to or come from."""
    recalled: bool = False
    """The link was asked to write nothing more of it."""
    given_up: bool = False
    """It was sent again. What may be left of it writes nothing."""


@dataclass(slots=True)
class LinkCounts:
    """Since the start, for reports."""

    direct_bytes: int = 0
    relayed_bytes: int = 0
    tasks: int = 0
    resent: int = 0
    """Micro-tasks that were sent again over another link."""
    stalls: int = 0
    errors: int = 0


@dataclass(slots=True, eq=False)
class _Queue:
    carriers: list[Port]
    """The links that can carry what is in it, the direct one first."""
    tasks: tuple[deque[MicroTask], deque[MicroTask]] = field(
        default_factory=lambda: (deque(), deque())
    )
    """Those of the foreground, and those of the background."""
    bytes: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(slots=True, eq=False)
class _Link:
    port: Port
    queue: _Queue
    foreign: list[_Queue]
    """Queues that it can relay for."""
    free: tuple[list[int], list[int]]
    """Slots for direct paths, and for relays. A relay that is stuck takes none of the others."""
    outstanding: list[Outstanding] = field(default_factory=list)
    recalled: int = 0
    """How many of them were recalled. Those are not counted as what the link carries."""
    relays_from_s: float = -math.inf
    """It does not relay before; infinity: never again."""
    background_from_s: float = -math.inf
    fastest_s_per_byte: float = math.inf
    stalls_in_row: int = 0
    counts: LinkCounts = field(default_factory=LinkCounts)

    @property
    def carried(self) -> int:
        return len(self.outstanding) - self.recalled


class Schedule:
    """The queues and links of one machine. Not thread-safe."""

    def __init__(
        self, ports: Iterable[Port], relays: Mapping[Port, Sequence[Port]], settings: Settings
    ) -> None:
        """`relays[port]` are the ports of other GPUs that the link of `port` can relay for."""
        self._settings = settings
        self._queues = {port: _Queue([port]) for port in ports}
        for port, others in relays.items():
            for other in others:
                self._queues[other].carriers.append(port)
        self._links = {
            port: _Link(
                port, queue, [self._queues[other] for other in relays.get(port, ())],
                (list(range(settings.depth)), list(range(settings.depth, 2 * settings.depth))),
            )
            for port, queue in self._queues.items()
        }  # fmt: skip
        self._waiting: dict[Port, _Queue] = {}
        """Queues that have anything. Turns are many, and most queues are empty."""
        self._active: dict[Port, _Link] = {}
        """Links that have anything outstanding."""
        self.over: list[Transfer] = []
        """Transfers that have ended, until the caller takes them out."""

    @property
    def ports(self) -> Sequence[Port]:
        return tuple(self._links)

    def counts(self, port: Port) -> LinkCounts:
        return self._links[port].counts

    def outstanding(self, port: Port) -> Sequence[Outstanding]:
        return self._links[port].outstanding

    @property
    def busy(self) -> bool:
        """Whether there is anything outstanding."""
        return bool(self._active)

    def active(self) -> Sequence[Port]:
        """Return the links that have anything outstanding."""
        return tuple(self._active)

    def carriers(self) -> Sequence[Port]:
        """Return the links that could carry what is queued, if they have room."""
        return tuple({port: None for queue in self._waiting.values() for port in queue.carriers})

    # ---- transfers ------------------------------------------------------------------------------

    def add(self, transfer: Transfer, tasks: Iterable[tuple[Port, tuple[Piece, ...]]]) -> None:
        """Queue the micro-tasks of a transfer. Raises KeyError for a port that is not there."""
        for port, pieces in tasks:
            queue = self._queues[port]
            task = MicroTask(transfer, port, pieces, sum(piece.size for piece in pieces))
            queue.tasks[transfer.background].append(task)
            queue.bytes[transfer.background] += task.size
            self._waiting[port] = queue
            transfer.waiting += 1
        self._end_if_over(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Drop what is queued of a transfer. It is over when what is outstanding is over."""
        if transfer.state == "moving":
            self._stop(transfer, "cancelled")

    def _stop(self, transfer: Transfer, state: State) -> None:
        transfer.state = state
        if transfer.waiting:
            for port, queue in list(self._waiting.items()):
                self._drop(queue, transfer)
                self._note_empty(port, queue)
        transfer.waiting = 0
        self._end_if_over(transfer)

    def _drop(self, queue: _Queue, transfer: Transfer) -> None:
        tasks = queue.tasks[transfer.background]
        left = [task for task in tasks if task.transfer is not transfer]
        if len(left) < len(tasks):
            tasks.clear()
            tasks.extend(left)
            queue.bytes[transfer.background] = sum(task.size for task in left)

    def _note_empty(self, port: Port, queue: _Queue) -> None:
        if not queue.tasks[0] and not queue.tasks[1]:
            self._waiting.pop(port, None)

    def _end_if_over(self, transfer: Transfer) -> None:
        if transfer.over:
            if transfer.state == "moving":
                transfer.state = "done"
            self.over.append(transfer)

    # ---- links ----------------------------------------------------------------------------------

    def pull(self, port: Port, now: float) -> Outstanding | None:
        """Return the micro-task that a link carries next, None if it has to wait."""
        link = self._links[port]
        if link.carried >= self._settings.depth:
            return None
        queue, background = self._choose(link, now)
        if queue is None:
            return None
        relayed = queue is not link.queue
        task = queue.tasks[background].popleft()
        queue.bytes[background] -= task.size
        self._note_empty(task.port, queue)
        task.transfer.waiting -= 1
        task.transfer.carried += 1
        late_s = now + self._settings.stall_s
        taken = Outstanding(port, link.free[relayed].pop(), task, now, late_s, relayed)
        link.outstanding.append(taken)
        self._active[port] = link
        return taken

    def _choose(self, link: _Link, now: float) -> tuple[_Queue | None, int]:
        foreign = link.foreign if self._relays(link, now) else ()
        queue = self._pick(link.queue, foreign, 0)
        if queue is not None:
            return queue, 0
        if link.carried or now < link.background_from_s:
            return None, 1  # background micro-tasks go one at a time
        return self._pick(link.queue, foreign, 1), 1

    def _relays(self, link: _Link, now: float) -> bool:
        """Return whether a link relays now: not while one of its relays is stuck."""
        return not link.recalled and now >= link.relays_from_s

    def _pick(self, own: _Queue, foreign: Sequence[_Queue], background: int) -> _Queue | None:
        best, most = None, 0
        if own.tasks[background]:
            if self._settings.order == "direct":
                return own
            best, most = own, own.bytes[background]
        for queue in foreign:
            if queue.bytes[background] > most:
                best, most = queue, queue.bytes[background]
        return best

    def arrived(self, one: Outstanding, now: float) -> None:
        """Note that a micro-task's bytes have arrived. Its slot is free again."""
        if one.recalled:
            # It may have ended because it was recalled. To send it again is always right.
            self.give_up(one)
            self.release(one)
            return
        link, task, took_s = self._links[one.port], one.task, now - one.since_s
        counts = link.counts
        counts.tasks += 1
        if one.relayed:
            counts.relayed_bytes += task.size
            link.stalls_in_row = 0
        else:
            counts.direct_bytes += task.size
        s_per_byte = took_s / max(1, task.size)
        if s_per_byte > self._settings.slow * link.fastest_s_per_byte:
            link.background_from_s = now + took_s
        link.fastest_s_per_byte = min(link.fastest_s_per_byte, s_per_byte)
        self.release(one)
        task.transfer.carried -= 1
        self._end_if_over(task.transfer)

    def release(self, one: Outstanding) -> None:
        """Free the slot of a micro-task: its link has no more to do with it."""
        link = self._links[one.port]
        link.outstanding.remove(one)
        link.recalled -= one.recalled
        if not link.outstanding:
            del self._active[one.port]
        link.free[one.relayed].append(one.slot)

    # ---- faults ---------------------------------------------------------------------------------

    def failed(self, one: Outstanding, fault: Exception) -> None:
        """Note an error of a link. A link that fails to relay never relays again, and what it
        carried is sent again. If the direct path fails, so does the transfer."""
        link = self._links[one.port]
        link.counts.errors += 1
        if one.relayed:
            link.relays_from_s = math.inf
            self.give_up(one)
            self.release(one)
            return
        transfer = one.task.transfer
        self.release(one)
        transfer.carried -= 1
        if transfer.fault is None:
            transfer.fault = fault
        self._stop(transfer, "failed")

    def stalled(self, now: float) -> list[Outstanding]:
        """Return the relays to recall now. Their links relay no more for a while."""
        found: list[Outstanding] = []
        for link in self._active.values():
            for one in link.outstanding:
                if one.relayed and not one.recalled and now >= one.late_s:
                    one.recalled = True
                    link.recalled += 1
                    found.append(one)
                    self._pause(link, now)
        return found

    def _pause(self, link: _Link, now: float) -> None:
        link.counts.stalls += 1
        if now >= link.relays_from_s:  # the first of those that stall together
            first_s = self._settings.pause_s
            pause_s = back_off_s(link.stalls_in_row, first_s, _PAUSE_MOST * first_s)
            link.relays_from_s = now + pause_s
            link.stalls_in_row += 1

    def give_up(self, one: Outstanding) -> None:
        """Send again what a relay carried, as the first of its queue. It writes nothing any more.

        Its slot stays taken until `release`.
        """
        if one.given_up:
            return
        one.given_up = True
        task = one.task
        transfer = task.transfer
        transfer.carried -= 1
        if transfer.state == "moving":
            queue = self._queues[task.port]
            queue.tasks[transfer.background].appendleft(task)
            queue.bytes[transfer.background] += task.size
            self._waiting[task.port] = queue
            transfer.waiting += 1
            self._links[one.port].counts.resent += 1
        else:
            self._end_if_over(transfer)

    def wakes_at(self, now: float) -> float:
        """Return when to look again if nothing is reported: for a stall, or for the background.

        It is infinity while there is nothing to wait for.
        """
        wakes = math.inf
        for link in self._active.values():
            for one in link.outstanding:
                if one.relayed and not one.recalled and one.late_s < wakes:
                    wakes = one.late_s
        if any(queue.tasks[1] for queue in self._waiting.values()):
            pauses = (link.background_from_s for link in self._links.values())
            wakes = min(wakes, min((pause_s for pause_s in pauses if now < pause_s), default=wakes))
        return wakes
