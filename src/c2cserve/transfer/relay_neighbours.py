"""The side of a relay that has the transfers: it finds neighbours that lend their links.

Each neighbour has a thread here. It connects when the neighbour's worker is up. It tells the worker
of the memory that transfers read and write, and lets the engine use the link. When the worker ends,
the engine sends again what it had. The thread goes on looking for the next one.

A worker that is killed may have begun relays that still write. They end with its process, so its
link counts as lost only then.
"""

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue

from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import Port
from c2cserve.transfer.relay_channel import (
    VERSION,
    GpuMemory,
    Message,
    SharedMemory,
    receive,
    send,
)

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_FAULTS = (OSError, RuntimeError, ValueError, KeyError)


@dataclass(frozen=True, slots=True)
class _Memory:
    address: int
    """This process's address of it."""
    size: int
    message: Message
    """What another process is told to open it with."""


class RelayNeighbours:
    """The links of other processes that an engine uses. Thread-safe."""

    def __init__(self, engine: TransferEngine, names: dict[Port, str]) -> None:
        """`names` are those of `relay_host.RelayHost`, by the engine's port for each."""
        self._engine = engine
        self._lock = threading.Lock()
        self._numbers = count()
        self._memory: dict[int, _Memory] = {}
        self._segments: dict[str, int] = {}
        """Path -> number."""
        self._asked: dict[Port, SimpleQueue[Message | None]] = {}
        """What connected neighbours are still to be told. Who opens memory waits for none of them:
        a neighbour may be opening memory, too."""
        self._connections: dict[Port, socket.socket] = {}
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=one, name="relay-neighbour", daemon=True)
            for one in names.items()
        ]
        for thread in self._threads:
            thread.start()

    # ---- memory ---------------------------------------------------------------------------------

    def add_gpu(self, address: int, memory: GpuMemory) -> None:
        """Share memory of this process's GPU, for good."""
        message = {"handle": memory.handle.hex(), "offset": memory.offset, "size": memory.size}
        self._add(_Memory(address, memory.size, message))

    def opened(self, path: str, address: int, size: int) -> None:
        """Share a segment of the pool."""
        self._segments[path] = self._add(_Memory(address, size, {"segment": path}))

    def closed(self, path: str) -> None:
        """Share a segment no more. No transfer reads it."""
        with self._lock:
            number = self._segments.pop(path)
            gone = self._memory.pop(number)
            for port, asked in self._asked.items():
                self._engine.unshare(port, gone.address)
                asked.put({"close": number})

    def _add(self, memory: _Memory) -> int:
        with self._lock:
            number = next(self._numbers)
            self._memory[number] = memory
            for asked in self._asked.values():
                asked.put({"open": number, **memory.message})
        return number

    def stop(self) -> None:
        """Use no link of another process any more. No transfer is under way."""
        self._stopping.set()
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    # ---- a thread for each neighbour ------------------------------------------------------------

    def _run(self, port: Port, name: str) -> None:
        last = ""
        while not self._stopping.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                try:
                    connection.connect(f"\0{name}")
                except OSError:  # it is not up yet, or not any more
                    self._stopping.wait(_RETRY_S)
                    continue
                try:
                    self._use(port, connection)
                except _FAULTS as fault:
                    if last != str(fault):
                        last = str(fault)
                        log.warning("%s does not relay: %s", port.name, fault)
                    self._stopping.wait(_RETRY_S)

    def _use(self, port: Port, connection: socket.socket) -> None:
        pid, _, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        process = os.pidfd_open(pid)
        try:
            channel = SharedMemory.create()
            send(connection, {"version": VERSION}, channel.descriptor)
            if receive(connection) != {"ready": True}:
                raise ConnectionError("its process does not lend the link")
            self._engine.connect(port, channel)
            try:
                log.info("%s relays", port.name)
                self._follow(port, connection, process)
            finally:
                self._engine.disconnect(port)
                log.info("%s relays no more", port.name)
        finally:
            os.close(process)

    def _follow(self, port: Port, connection: socket.socket, process: int) -> None:
        """Share memory with the neighbour until nothing of it can write any more."""
        asked = SimpleQueue[Message | None]()
        telling = threading.Thread(target=_tell, args=(connection, asked), daemon=True)
        telling.start()
        try:
            with self._lock:
                self._asked[port], self._connections[port] = asked, connection
                for number, memory in self._memory.items():
                    asked.put({"open": number, **memory.message})
            while (message := receive(connection)) is not None:
                if message.get("bye"):
                    return  # what it began is over
                self._answered(port, message)
        except _FAULTS as fault:
            log.warning("%s: the neighbour's process is lost: %s", port.name, fault)
        finally:
            with self._lock:
                del self._asked[port], self._connections[port]
            asked.put(None)
            telling.join()
        self._wait_for_end(connection, process)

    def _wait_for_end(self, connection: socket.socket, process: int) -> None:
        """Wait until the neighbour says that its relays are over, or its process has ended."""
        with contextlib.suppress(*_FAULTS):
            connection.shutdown(socket.SHUT_WR)
            while (message := receive(connection)) is not None:
                if message.get("bye"):
                    return
        while not self._stopping.is_set() and not select.select([process], [], [], _RETRY_S)[0]:
            pass

    def _answered(self, port: Port, message: Message) -> None:
        number = message.get("opened", message.get("refused"))
        with self._lock:
            memory = self._memory.get(number) if isinstance(number, int) else None
            if memory is None:  # it was closed meanwhile
                return
            if "opened" in message:
                self._engine.share(port, memory.address, message["address"], memory.size)
                return
        log.warning("%s does not relay a part of the memory: %s", port.name, message["reason"])


def _tell(connection: socket.socket, messages: "SimpleQueue[Message | None]") -> None:
    """Send messages until None. A neighbour that is gone is told nothing more."""
    with contextlib.suppress(OSError):
        while (message := messages.get()) is not None:
            send(connection, message)
