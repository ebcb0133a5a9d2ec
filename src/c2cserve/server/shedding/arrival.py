"""When a request arrived.

A busy event loop reads late. What waits unread is invisible to it, so a time to first token that
counts from the first line of code is too short. The kernel knows when the bytes came.
"""

import asyncio
import ctypes
import socket
import time

_LAST_DATA_AT = 52
"""Offset of `tcpi_last_data_recv` in Linux' `struct tcp_info`: milliseconds since data arrived."""
_TICK_S = 0.01
"""The kernel counts in ticks of up to so long. A shorter wait cannot be told from none."""

_getsockopt = ctypes.PyDLL(None).getsockopt
"""It holds the interpreter's lock, so no other thread runs meanwhile. The method of uvloop's
sockets makes a socket for each call. That takes ten times as long."""


def descriptor(transport: asyncio.BaseTransport) -> int:
    """Return the file descriptor of a connection, -1 if it has none."""
    connection = transport.get_extra_info("socket")
    return -1 if connection is None else int(connection.fileno())


class ArrivalClock:
    """Asks the kernel. One thread may use it at a time."""

    def __init__(self) -> None:
        self._info = ctypes.create_string_buffer(_LAST_DATA_AT + 4)
        self._size = ctypes.c_uint32()
        self._asked = ctypes.byref(self._size)

    def arrived_s(self, descriptor: int) -> float:
        """Return when the last bytes of a connection arrived, as `time.monotonic` counts. It is now
        for what is no TCP connection."""
        now, self._size.value = time.monotonic(), len(self._info)
        if _getsockopt(
            descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, self._info, self._asked
        ):  # fmt: skip
            return now
        unread_s = int.from_bytes(self._info.raw[_LAST_DATA_AT:], "little") / 1e3
        return now if unread_s <= _TICK_S else now - unread_s
