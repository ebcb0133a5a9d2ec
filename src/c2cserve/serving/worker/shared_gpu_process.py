"""One process for all slices of a GPU: partitions compute at the same time only within one process.

The server starts a process per slice. Several slices may be parts of the same GPU. The first of
their processes becomes the *shared process*: it splits the GPU once and runs its own slice. The
others *join* it as members. A member hands over its configuration and its channel to the
controller, and then lives as long as its slice.

    server --- channel ---> member --- configuration, channel ---> shared process: a thread
                            ends with its slice <--- b"0", or nothing ---

A process that is killed takes its slice with it, and a thread cannot be killed alone. Therefore all
abort together: if a member's process ends before its slice, the shared process ends, and with it
every member.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_DONE = b"0"
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 64

Serve = Callable[[bytes, socket.socket], None]
"""Run a slice to its end, given its configuration and its channel's socket."""


class SharedGpuProcess:
    """The accepting side of the shared process. `open_shared_process` makes it."""

    def __init__(self, listener: socket.socket, serve: Serve, abort: Callable[[], None]) -> None:
        self._listener = listener
        self._serve = serve
        self._abort = abort
        self._lock = threading.Lock()
        self._members: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="shared-gpu", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accept no further members, and wait until the members' slices have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; `close` does not
        self._listener.close()
        self._accepting.join()  # until then the name is taken
        with self._lock:
            members = list(self._members)
        for member in members:
            member.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if not _is_same_user(connection):
                connection.close()
                continue
            member = threading.Thread(target=self._run_member, args=(connection,), daemon=True)
            with self._lock:
                self._members.append(member)
            member.start()

    def _run_member(self, connection: socket.socket) -> None:
        config, channel = _receive(connection)
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(connection, ended), daemon=True)
        watch.start()
        with connection, channel:
            verdict = _DONE
            try:
                self._serve(config, channel)
            except Exception:
                log.exception("a slice failed: its GPU's process ends")
                verdict = b""
                self._abort()
            ended.set()
            with contextlib.suppress(OSError):  # the member may be gone
                connection.sendall(verdict)
                connection.shutdown(socket.SHUT_RDWR)
            watch.join()

    def _watch(self, connection: socket.socket, ended: threading.Event) -> None:
        """Wait for the member's end. A member sends nothing more, so any read result is its end."""
        with contextlib.suppress(OSError):
            connection.recv(1)
        if not ended.is_set():
            log.error("a slice's process was ended before its slice: so is its GPU's")
            self._abort()


def open_shared_process(
    name: str, serve: Serve, abort: Callable[[], None]
) -> SharedGpuProcess | None:
    """Become the shared process of all slices that use `name`; None if another process is it.
    `abort` ends the process at once."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")  # without a file: it goes with its process
    except OSError:
        listener.close()
        return None
    listener.listen(_BACKLOG)
    return SharedGpuProcess(listener, serve, abort)


def join_shared_process(name: str, config: bytes, channel: socket.socket) -> int | None:
    """Have the shared process run this process's slice. Return the exit status when the slice has
    ended, None if there is no shared process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(f"\0{name}")
            socket.send_fds(connection, [_LENGTH.pack(len(config))], [channel.fileno()])
            connection.sendall(config)
        except OSError:
            return None
        try:
            verdict = connection.recv(1)
        except OSError:
            verdict = b""
    return 0 if verdict == _DONE else 1


def _receive(connection: socket.socket) -> tuple[bytes, socket.socket]:
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    config = bytearray()
    (length,) = _LENGTH.unpack(head)
    while len(config) < length:
        part = connection.recv(length - len(config))
        if not part:
            raise EOFError("a member ended before its configuration was complete")
        config += part
    return bytes(config), socket.socket(fileno=descriptors[0])


def _is_same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return user == os.getuid()
