"""Servers in forks of one process that has imported what they and their workers need.

Most of the processor time of a server's start is imports, and tests start servers by the dozen.
Such a server is a process of its own, a child of the test's. Its first fork server of workers is a
fork, too, and so are its text processes; all else, later fork servers included, it starts as ever.
Faults are injected before it begins. (Tests of starts, of command lines and of environments execute
`c2cserve serve`.)
"""

import atexit
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from text_forks import TextForks, serve_forks

from c2cserve.cli import main
from c2cserve.runtime.environment import child_environment
from c2cserve.serving.ipc.forks import Adopted, Child, ForkServer
from c2cserve.serving.ipc.worker_forks import FORK_SERVER, FORK_SERVERS, ONE_THREAD
from c2cserve.serving.worker.process import fork_on_request, worker

_IMPORTED = (
    "c2cserve.cli.serve",
    "c2cserve.serving.live_server",
    "c2cserve.serving.worker.engine_host",
)
_FAULTS = "C2CSERVE_TEST_FAULTS"
_OWN = frozenset({_FAULTS, "PYTHONPATH", "PYTEST_CURRENT_TEST", "C2CSERVE_API_KEYS"})
"""Variables that a test may set for a server that is forked."""


class ForkedServer(Adopted):
    """What a server's process is to a test: as much of `subprocess.Popen` as tests use."""

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess.Popen.wait`. Raises TimeoutExpired."""
        if self.poll() is None and timeout is not None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(["c2cserve", "serve"], timeout)
            finally:
                os.close(ended)
        return super().wait()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ServerForks:
    """Starts all forked servers of a test process."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        # The arguments at the end are those by which tests know a fork server of workers.
        command = (sys.executable, __file__, "c2cserve.serving.worker.process")
        self._server = ForkServer(command, {**self._environment, **ONE_THREAD})
        atexit.register(self._server.close)

    def can_start(self, args: Sequence[str]) -> bool:
        """Whether a fork is what the command would be: with the same variables, and without keys
        among its arguments, which a server hides in its command line."""
        keys = any(arg.startswith(("--api-key", "--admin-key")) for arg in args)
        others = {name for name, _ in os.environ.items() ^ self._environment.items()}
        return not keys and others <= _OWN

    def start(self, args: Sequence[str], log: Path, files: int | None) -> ForkedServer:
        """Start `c2cserve serve` with these arguments. Its output goes to `log`. `files`: the most
        descriptors that it may have, as `ulimit -n` sets it. Raises OSError."""
        told, its = socket.socketpair()
        with told, its:
            self._server.ask(its)
            while (child := self._server.answer()) is None:
                select.select([self._server], [], [])
            said = {
                "args": args, "log": str(log), "directory": str(Path.cwd()),
                "environment": dict(os.environ), "files": files,
            }  # fmt: skip
            told.sendall(json.dumps(said).encode())
        return ForkedServer(child.pid)


# ---- in the process that is forked ---------------------------------------------------------------


class _ForkedForkServer(ForkServer):
    """A server's fork server of workers, as a fork of the server before it has begun."""

    def _start(
        self, command: Sequence[str], its: socket.socket, environment: Mapping[str, str]
    ) -> Child:
        pid = os.fork()
        if pid:
            return Adopted(pid)
        os.setpgid(0, 0)
        self._socket.close()
        os.dup2(its.fileno(), 0)
        its.close()
        _set_environment(environment)
        self._run()
        raise AssertionError("the fork server has returned")

    def _run(self) -> None:
        worker()


class _ForkedTextForks(_ForkedForkServer):
    def _run(self) -> None:
        serve_forks(socket.socket(fileno=os.dup(0)))


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _serve(end: int) -> None:
    """Be the server that the other end of this descriptor tells of."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with socket.socket(fileno=end) as told:
        said = json.loads(b"".join(iter(lambda: told.recv(1 << 16), b"")))
    log = os.open(said["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(said["directory"])
    _set_environment(said["environment"])
    if said["files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (said["files"], said["files"]))
    if _FAULTS in os.environ:  # as an interpreter does when it starts
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    sys.argv = ["c2cserve", "serve", *said["args"]]
    FORK_SERVERS.add(_ForkedForkServer(FORK_SERVER, child_environment(**ONE_THREAD)))
    texts = TextForks(_ForkedTextForks)
    texts.start()
    texts.replace()
    status: object = 0
    try:
        main.app(sys.argv[1:])
    except SystemExit as end:
        status = end.code
    _end(status if isinstance(status, int) else int(status is not None))


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but leave its objects: freeing each one writes to pages that
    forks share, which takes longer than a server's end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fork_servers() -> None:
    gc.disable()  # as in the fork server of workers
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.enable()
    gc.freeze()
    end = fork_on_request(socket.socket(fileno=os.dup(0)))
    if end is not None:
        _serve(end)


if __name__ == "__main__":
    sys.path.pop(0)  # the tests' modules
    _fork_servers()
