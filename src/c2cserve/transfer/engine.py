"""The transfer engine: moves bytes between host memory and GPUs over all links, in stream order.

    caller      submit ─▶ ticket ................ poll, wait, cancel
    stream      | before |   goes on
    engine               | micro-tasks over all links | over

A transfer begins when all that its stream had before it is over. The stream goes on meanwhile: the
caller launches what needs the bytes once the ticket is over. Small transfers are one copy on the
direct path.

The engine is native code with a thread of its own (`transfer/native/engine.h`). No call of it needs
the interpreter's lock.
"""

import ctypes
import logging
import math
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

from c2cserve.transfer.library import CLOSED, COUNTS, INVALID, CountsView, Result, library
from c2cserve.transfer.moves import Port, Segment, pack
from c2cserve.transfer.relay_channel import SharedMemory
from c2cserve.transfer.settings import Urgency

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_SLEEP_S = 0.2
"""The longest sleep of a caller that waits: signals are handled after it."""
_WORDS = 5
_INCIDENT_BYTES = 512
_STATES: tuple["State", ...] = ("moving", "done", "cancelled", "failed")
State = Literal["moving", "done", "cancelled", "failed"]


class LinkError(RuntimeError):
    """A link failed. The message has the driver's error."""


class TransferError(RuntimeError):
    """A transfer failed: its target has any bytes. What was computed from them is wrong."""


class Device(Protocol):
    @property
    def index(self) -> int | None: ...


class Stream(Protocol):
    """`torch.cuda.Stream`, of a GPU that the engine has links of."""

    @property
    def cuda_stream(self) -> int: ...

    @property
    def device(self) -> Device: ...


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """What a link has done since the start, for reports."""

    direct_bytes: int
    relayed_bytes: int
    tasks: int
    resent: int
    """Micro-tasks that were sent again over another link."""
    stalls: int
    errors: int


class Ticket:
    """One submission, for the methods of the engine that took it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, library().c2c_transfers_free, handle).atexit = False


class RelayServer:
    """Relays for another process (`transfer/native/relay_server.h`)."""

    def __init__(self, engine: int, server: int) -> None:
        self._engine, self._server = engine, server

    def set_streaming(self, streams: bool) -> None:
        """Tell the other process whether steps read over this GPU's link."""
        library().c2c_relays_streaming(self._server, streams)

    @property
    def relayed(self) -> int:
        """Micro-tasks."""
        return library().c2c_relays_count(self._server)

    def close(self) -> None:
        """Relay no more, and wait for what has begun. Nothing is called afterwards."""
        library().c2c_relays_close(self._engine, self._server)


class TransferEngine:
    """Moves bytes over the links that it is given. Thread-safe, except for `close`."""

    def __init__(self, ports: Sequence[Port], open_native: Callable[[], Result]) -> None:
        """`open_native` makes the native engine (`transfer.gpus.open_engine`).

        Raises `LinkError`.
        """
        self._ports = tuple(ports)
        self._library = library()
        self._engine: int | None = self._checked(open_native())
        self._channels: dict[Port, SharedMemory] = {}
        """What links of other processes were last connected with."""

    def submit(
        self, segments: "Sequence[Segment] | array[int]", stream: Stream | None = None, *,
        urgency: Urgency = Urgency.LOAD,
    ) -> Ticket:  # fmt: skip
        """Move segments after all that `stream` has now, and return at once.

        No two segments may write the same byte, and none may read what another writes. Without a
        stream, the transfer begins at once. Transfers of one class and port are carried in the
        order in which they begin. Thousands of segments are faster as an array of `moves.pack`,
        which can be used again.

        The memory has to stay until the ticket is over. Raises ValueError for a segment without a
        path and for host memory that is not pinned. Raises `LinkError`, and `TransferError` if the
        engine is closed.
        """
        packed = segments if isinstance(segments, array) else pack(segments)
        start, words = packed.buffer_info()
        handle, gpu = (0, -1) if stream is None else (stream.cuda_stream, stream.device.index)
        self._log_incidents()
        result = self._library.c2c_transfers_submit(
            self._native(), start, words // _WORDS, handle, gpu, urgency
        )
        return Ticket(self._checked(result))

    def poll(self, ticket: Ticket) -> bool:
        """Return whether the transfer is over: done or cancelled. Raises `TransferError`."""
        return self.state(ticket) != "moving"

    def wait(
        self, ticket: Ticket, timeout_s: float | None = None, *, spins: bool = True
    ) -> bool:  # fmt: skip
        """Block until the transfer is over, or for `timeout_s`. Return whether it is over.

        With `spins` the caller polls without pause at first. Raises `TransferError`.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll(ticket):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            engine = self._native()
            self._library.c2c_transfers_wait(engine, ticket.handle, min(left_s, _SLEEP_S), spins)
            spins = False
        self._log_incidents()
        return True

    def cancel(self, ticket: Ticket) -> None:
        """Move no more of a transfer than what is under way. It is over soon, not at once.

        The target may have any of the bytes. A transfer that is a single copy is not cancelled.
        """
        self._library.c2c_transfers_cancel(self._native(), ticket.handle)

    def follow(self, ticket: Ticket, stream: Stream) -> None:
        """Let what `stream` is given from now on come after a transfer of which nothing is queued:
        one that was cancelled, or a single copy. Raises ValueError for any other, and
        `LinkError`."""
        number = self._library.c2c_transfers_follow(
            self._native(), ticket.handle, stream.cuda_stream, stream.device.index
        )
        if number < 0:
            self._raise(number)

    def state(self, ticket: Ticket) -> State:
        """Return how the transfer is, or how it ended. Raises `TransferError` if it failed."""
        number: int = self._library.c2c_transfers_state(ticket.handle)
        state = "moving" if number < 0 else _STATES[number]
        if state == "failed":
            raise TransferError(self._library.c2c_transfers_fault(ticket.handle).decode())
        return state

    def moved_bytes(self, ticket: Ticket) -> int:
        """Return how many bytes of the transfer have arrived."""
        return self._library.c2c_transfers_moved(ticket.handle)

    def counts(self) -> dict[str, LinkCounts]:
        """Return what each link has carried, by the port's name."""
        return {port.name: counts for port, counts in self.port_counts()}

    def port_counts(self) -> list[tuple[Port, LinkCounts]]:
        """Return what each link has carried."""
        self._log_incidents()
        found: list[tuple[Port, LinkCounts]] = []
        for link, port in enumerate(self._ports):
            view = CountsView()
            self._library.c2c_transfers_counts(self._native(), link, ctypes.byref(view))
            found.append((port, LinkCounts(*(getattr(view, name) for name in COUNTS))))
        return found

    # ---- links of other processes ---------------------------------------------------------------

    def connect(self, port: Port, channel: SharedMemory) -> None:
        """Let a link of another process relay. Raises ValueError while it has micro-tasks."""
        number = self._library.c2c_transfers_connect(
            self._native(), self._ports.index(port), channel.address
        )
        if number < 0:
            self._raise(number)
        self._channels[port] = channel

    def disconnect(self, port: Port) -> None:
        """Send again what such a link had: nothing of its process writes any more."""
        self._library.c2c_transfers_disconnect(self._native(), self._ports.index(port))

    def share(self, port: Port, near: int, far: int, size: int) -> None:
        """Note that the link's process has memory of this one at the address `far`."""
        link = self._ports.index(port)
        self._library.c2c_transfers_share(self._native(), link, near, far, size)

    def unshare(self, port: Port, near: int) -> None:
        """Note that it has not any more. No transfer reads or writes that memory."""
        self._library.c2c_transfers_unshare(self._native(), self._ports.index(port), near)

    def open_server(self, open_native: Callable[[int], Result]) -> "RelayServer":
        """Relay for another process, while this engine moves nothing itself. `open_native` is given
        the engine. Raises `LinkError`."""
        return RelayServer(self._native(), self._checked(open_native(self._native())))

    # ---- its end --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cancel all transfers, and end the engine's thread. Other threads may still ask for
        tickets, but nothing is submitted any more.

        Raises `TransferError` if a copy does not end.
        """
        self._log_incidents()
        if not self._library.c2c_transfers_stop(self._native(), _CLOSE_S):
            raise TransferError(f"a copy has not ended for {_CLOSE_S:.0f} s")

    def close(self) -> None:
        """Stop, and free the engine: no ticket is used afterwards with it.

        Raises `TransferError` if a copy does not end, and leaves its memory alone then.
        """
        if self._engine is None:
            return
        self.stop()
        engine, self._engine = self._engine, None
        self._library.c2c_transfers_delete(engine)

    def _native(self) -> int:
        if self._engine is None:
            raise TransferError("the transfer engine is closed")
        return self._engine

    def _checked(self, result: Result) -> int:
        if result.value is None:
            self._raise(result.error)
        return result.value

    def _raise(self, error: int) -> NoReturn:
        message = self._library.c2c_transfers_error().decode()
        if error == INVALID:
            raise ValueError(message)
        raise TransferError(message) if error == CLOSED else LinkError(message)

    def _log_incidents(self) -> None:
        text = ctypes.create_string_buffer(_INCIDENT_BYTES)
        while self._library.c2c_transfers_incident(self._native(), text, _INCIDENT_BYTES):
            log.warning("%s", text.value.decode(errors="replace"))
