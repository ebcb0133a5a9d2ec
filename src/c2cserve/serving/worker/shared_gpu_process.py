"""Slices of one GPU under one roof: partitions compute at the same time only within one process.

The server starts a process per slice. Of those whose slices are parts of the same GPU, the first
becomes the house: it splits the GPU once and runs its own slice. The others lodge there: each hands
over its configuration and its channel to the controller, and from then on only lives as its slice
does.

    server --- channel ---> lodger's process --- configuration, channel ---> house: a thread
                            ends with its slice <------- b"0", or nothing ---

A process that is killed takes its slice with it, and a thread can not be killed alone: when a
lodger's process ends before its slice does, the house ends, and with it every lodger.
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
_WAITING = 64

Serve = Callable[[bytes, socket.socket], None]
"""Run a slice to its end, given its configuration and its channel's socket."""


class House:
    """Made by `open_house`."""

    def __init__(self, listener: socket.socket, serve: Serve, fall: Callable[[], None]) -> None:
        self._listener = listener
        self._serve = serve
        self._fall = fall
        self._lock = threading.Lock()
        self._lodgers: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="house", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Take nobody else in, and wait for the lodgers' slices to end."""
        self._listener.shutdown(socket.SHUT_RDWR)  # which wakes who accepts; closing does not
        self._listener.close()
        self._accepting.join()  # until then the name is taken
        with self._lock:
            lodgers = list(self._lodgers)
        for lodger in lodgers:
            lodger.join()

    def _accept(self) -> None:
        while True:
            try:
                door, _ = self._listener.accept()
            except OSError:  # closed
                return
            if not _is_ours(door):
                door.close()
                continue
            lodger = threading.Thread(target=self._take_in, args=(door,), daemon=True)
            with self._lock:
                self._lodgers.append(lodger)
            lodger.start()

    def _take_in(self, door: socket.socket) -> None:
        config, channel = _receive(door)
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(door, ended), daemon=True)
        watch.start()
        with door, channel:
            verdict = _DONE
            try:
                self._serve(config, channel)
            except Exception:
                log.exception("a slice failed: its GPU's process ends")
                verdict = b""
                self._fall()
            ended.set()
            with contextlib.suppress(OSError):  # the lodger may be gone
                door.sendall(verdict)
                door.shutdown(socket.SHUT_RDWR)
            watch.join()

    def _watch(self, door: socket.socket, ended: threading.Event) -> None:
        """A lodger says nothing: what can be read is its end."""
        with contextlib.suppress(OSError):
            door.recv(1)
        if not ended.is_set():
            log.error("a slice's process was ended before its slice: so is its GPU's")
            self._fall()


def open_house(name: str, serve: Serve, fall: Callable[[], None]) -> House | None:
    """Be the process of all slices that use `name`; None if another one is. `fall` ends the process
    at once."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")  # without a file: it goes with its process
    except OSError:
        listener.close()
        return None
    listener.listen(_WAITING)
    return House(listener, serve, fall)


def lodge(name: str, config: bytes, channel: socket.socket) -> int | None:
    """Have the house run this process's slice; returns the exit status when it has ended, None if
    there is no house."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        try:
            door.connect(f"\0{name}")
            socket.send_fds(door, [_LENGTH.pack(len(config))], [channel.fileno()])
            door.sendall(config)
        except OSError:
            return None
        try:
            said = door.recv(1)
        except OSError:
            said = b""
    return 0 if said == _DONE else 1


def _receive(door: socket.socket) -> tuple[bytes, socket.socket]:
    head, descriptors, _, _ = socket.recv_fds(door, _LENGTH.size, 1)
    config = bytearray()
    (length,) = _LENGTH.unpack(head)
    while len(config) < length:
        part = door.recv(length - len(config))
        if not part:
            raise EOFError("a lodger went before it came in")
        config += part
    return bytes(config), socket.socket(fileno=descriptors[0])


def _is_ours(door: socket.socket) -> bool:
    raw = door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return user == os.getuid()
