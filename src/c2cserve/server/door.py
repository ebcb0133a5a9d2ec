"""When a request arrived: before the server has read it, the kernel has.

A busy event loop reads late. What waits unread is invisible to it, so a time to first token that
counts from the first line of code is too short.
"""

import asyncio
import socket
import time

_LAST_DATA_AT = 52
"""Offset of `tcpi_last_data_recv` in Linux' `struct tcp_info`: milliseconds since data arrived."""
_TICK_S = 0.01
"""The kernel counts in ticks of up to so long. A shorter wait cannot be told from none."""


def arrived_s(transport: asyncio.BaseTransport) -> float:
    """Return when the last bytes of a connection arrived, as `time.monotonic` counts. It is now
    for what is no TCP connection."""
    now, connection = time.monotonic(), transport.get_extra_info("socket")
    if connection is None:
        return now
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_AT + 4)
    except OSError:
        return now
    unread_s = int.from_bytes(info[_LAST_DATA_AT:], "little") / 1e3
    return now if unread_s <= _TICK_S else now - unread_s
