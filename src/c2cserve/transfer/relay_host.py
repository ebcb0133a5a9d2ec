"""The side of a relay that lends its GPU's link to other processes.

It runs in the worker that owns the GPU. Each client has a connection, a thread for its messages,
and a native thread that copies what the client submits (`transfer/native/relay_server.h`). Both
sleep while there is nothing.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Protocol

from c2cserve.transfer.relay_channel import (
    VERSION,
    GpuMemory,
    Message,
    receive,
    receive_with_memory,
    send,
)

log = logging.getLogger(__name__)

_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")


class RelayServer(Protocol):
    """Copies what one client submits (`transfer.engine.RelayServer`)."""

    def set_streaming(self, streams: bool) -> None: ...

    def close(self) -> None: ...


class RelayMemory(Protocol):
    """Memory of other processes, as this one reads and writes it. Thread-safe. `open_` methods
    raise RuntimeError, OSError and ValueError."""

    def open_segment(self, path: str) -> int:
        """Return the address of a segment of the pool, which stays until `close_segment`."""
        ...

    def close_segment(self, path: str) -> None: ...

    def open_gpu(self, memory: GpuMemory) -> int: ...

    def close_gpu(self, address: int) -> None: ...


class RelayHost:
    """Relays for those who connect to `name`, until `close`."""

    def __init__(
        self, name: str, make_server: Callable[[int], RelayServer], memory: RelayMemory
    ) -> None:
        """`make_server` is called with the address of a channel's memory, and raises RuntimeError
        and ValueError. Raises OSError if another process has the name."""
        self._make_server = make_server
        self._memory = memory
        self._lock = threading.Lock()
        self._servers: set[RelayServer] = set()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._streaming = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")  # without a file: it goes with its process
        self._listener.listen(_BACKLOG)
        self._accepting = threading.Thread(target=self._accept, name="relay-host", daemon=True)
        self._accepting.start()

    def set_streaming(self, streams: bool) -> None:
        """Tell the clients whether steps read over the GPU's link: nothing is relayed meanwhile."""
        with self._lock:
            if streams != self._streaming:
                self._streaming = streams
                for server in self._servers:
                    server.set_streaming(streams)

    def close(self) -> None:
        """Relay no more. What has begun is over when this returns."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        self._accepting.join()
        with self._lock:
            connections = dict(self._connections)
        for connection, thread in connections.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
            with self._lock:
                self._connections[connection] = thread
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                if _is_same_user(connection):
                    self._serve(connection)
            except (OSError, RuntimeError, ValueError, LookupError) as fault:
                log.warning("relays for another GPU's slices end: %s", fault)
            finally:
                with self._lock:
                    del self._connections[connection]

    def _serve(self, connection: socket.socket) -> None:
        hello, memory = receive_with_memory(connection)
        if hello["version"] != VERSION:
            raise ValueError(f"the other process speaks version {hello['version']}")
        server = self._make_server(memory.address)
        with self._lock:
            self._servers.add(server)
            server.set_streaming(self._streaming)
        opened: dict[int, Callable[[], None]] = {}
        try:
            send(connection, {"ready": True})
            while (message := receive(connection)) is not None:
                if "open" in message:
                    send(connection, self._open(message, opened))
                else:
                    opened.pop(message["close"], _nothing)()
        finally:
            with self._lock:
                self._servers.discard(server)
            server.close()
            for close in opened.values():
                close()
            del memory
            with contextlib.suppress(OSError):  # the client may be gone
                send(connection, {"bye": True})

    def _open(self, message: Message, opened: dict[int, Callable[[], None]]) -> Message:
        number = message["open"]
        memory = self._memory
        try:
            if "segment" in message:
                path: str = message["segment"]
                address = memory.open_segment(path)
                opened[number] = lambda: memory.close_segment(path)
            else:
                shared = GpuMemory(
                    bytes.fromhex(message["handle"]), message["offset"], message["size"]
                )
                address = memory.open_gpu(shared)
                opened[number] = lambda: memory.close_gpu(address)
        except (OSError, RuntimeError, ValueError) as fault:
            return {"refused": number, "reason": f"{type(fault).__name__}: {fault}"}
        return {"opened": number, "address": address}


def _nothing() -> None:
    pass


def _is_same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return user == os.getuid()
