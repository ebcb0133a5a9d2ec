"""Processes that a *fork server* starts for this one.

A fresh process spends seconds importing its array library. The fork server has imported it, and
each process that it starts is a copy of it: ready within milliseconds, sharing that memory.

    this process --- a byte, and the child's end of a channel ---> fork server --- fork ---> child
                 <-- the child's process id, or minus an errno ---

The child is a child of this process, which is told of its end as of any other. For that the fork
server forks twice: the process in between ends, and its orphan falls to this process, which is a
"subreaper" (prctl(2)). The other side is `serving.worker.process`.
"""

import ctypes
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

PID = struct.Struct("<i")
"""An answer of the fork server: a process id, or minus an errno."""
_PR_SET_CHILD_SUBREAPER = 36


class Child(Protocol):
    """What a process is to the one that watches it. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit status, minus the signal that killed it, or None while it runs."""
        ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class Adopted:
    """A child of this process that the fork server started. Used by one thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        status = self._reap(0)
        assert status is not None
        return status

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        if self._status is None:  # else its number may be another process's
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """This process's end of a fork server. Used by one thread; only `close` blocks."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError, leaving nothing behind."""
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError(ctypes.get_errno(), "cannot adopt processes")
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with its:
                self._process = self._start(command, its, environment)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def _start(
        self, command: Sequence[str], its: socket.socket, environment: Mapping[str, str]
    ) -> Child:
        """Start the process, with `its` end as its standard input. Raises OSError."""
        return subprocess.Popen(
            command, stdin=its.fileno(), env=environment,
            process_group=0,  # a terminal's ctrl-C is for this process
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def fileno(self) -> int:
        """The descriptor that becomes readable when there is an answer, or none will come."""
        return self._socket.fileno()

    def ask(self, end: socket.socket) -> None:
        """Ask for a process whose standard input is `end`. Raises OSError."""
        socket.send_fds(self._socket, [b"\0"], [end.fileno()])

    def answer(self) -> Child | None:
        """Return the process that was asked for, or None if it is not there yet.

        Raises OSError if there will be none. `EOFError`: the fork server is gone."""
        try:
            data = self._socket.recv(PID.size)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        [pid] = PID.unpack(data)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return Adopted(pid)

    def close(self) -> int:
        """Kill the fork server, and return its exit status. Its children live on."""
        self._process.kill()
        status = self._process.wait()
        self._socket.close()
        return status
