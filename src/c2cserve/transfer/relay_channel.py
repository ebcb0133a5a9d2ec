"""What two processes share, of which one relays for the other: memory, and a socket's messages.

    client   hello (+ the memory's descriptor) ─▶            server: another worker, of a neighbour
             ◀─ ready
             open 3: a segment, or memory of a GPU ─▶
             ◀─ opened 3 at an address of the server's
             close 3 ─▶ ...                      ◀─ bye, before it closes the socket

Micro-tasks need no message: they are in the shared memory (`transfer/native/relay_channel.h`).
"""

import ctypes
import json
import mmap
import os
import socket
from dataclasses import dataclass
from typing import Any, cast

from c2cserve.transfer.library import library

VERSION = 2
_MESSAGE_BYTES = 16 << 10

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of a GPU, as another process opens it."""

    handle: bytes
    """CUDA's handle of the allocation."""
    offset: int
    """Where in the allocation the memory begins."""
    size: int


class SharedMemory:
    """The memory of a channel, zeros at first. It is mapped as long as this object is."""

    def __init__(self, descriptor: int) -> None:
        """Own the descriptor of the memory. Raises OSError and ValueError for another's."""
        self.descriptor = descriptor
        size = int(library().c2c_transfers_channel_bytes())
        if os.fstat(descriptor).st_size < size:
            raise ValueError(f"a channel has {size} bytes")
        self._map = mmap.mmap(descriptor, size)
        self._view = (ctypes.c_char * size).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)

    @classmethod
    def create(cls) -> "SharedMemory":
        descriptor = os.memfd_create("c2cserve-relays")
        os.ftruncate(descriptor, int(library().c2c_transfers_channel_bytes()))
        return cls(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def send(connection: socket.socket, message: Message, *descriptors: int) -> None:
    """Send one message. Raises OSError if the other side is gone."""
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(connection, [data], list(descriptors))
    else:
        connection.send(data)


def receive(connection: socket.socket) -> Message | None:
    """Wait for a message; None at the end. Raises OSError and ValueError."""
    data = connection.recv(_MESSAGE_BYTES)
    return cast("Message", json.loads(data)) if data else None


def receive_with_memory(connection: socket.socket) -> tuple[Message, SharedMemory]:
    """Wait for a message that brings the memory. Raises OSError and ValueError."""
    data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
    if not descriptors:
        raise ValueError("the channel's memory is missing")
    return json.loads(data), SharedMemory(descriptors[0])
