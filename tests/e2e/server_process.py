"""A real `c2cserve serve` in a process of its own, for tests that use it as a user would."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from child_processes import children_of
from cli_forks import CliForks
from server_forks import ForkedServer, ServerForks

SPECIALISTS = Path(__file__).parents[2] / "examples" / "specialists"
CATALOG = SPECIALISTS / "catalog.toml"
_PORTS = count(os.getpid())


def free_port() -> int:
    """One that the kernel gives to nobody who asks for any port, nor a test process beside this
    one to its servers: it is still free when the server comes to bind it."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + 1_000 * (process % 10) + next(_PORTS) % 1_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_cli(*args: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    return _cli_forks().run(args, timeout_s)


@cache
def _cli_forks() -> CliForks:
    return CliForks()


@cache
def _server_forks() -> ServerForks:
    return ServerForks()


class ServerProcess:
    """Started by `with`; killed (and everything it left removed) at the end."""

    def __init__(
        self,
        *args: str,
        catalog: Path = CATALOG,
        directory: Path,
        slices: int = 2,
        settled: bool = True,
        files: int | None = None,
        wrapper: Sequence[str] = (),
        admin_key: str = "",
        log: Path | None = None,
        policy: str = "",
    ) -> None:
        """`settled`: wait until every model is in the pool (it must have room for all). `files`:
        descriptors that the server may have open, as `ulimit -n` sets it. `wrapper`: a command
        that ends by executing the one that is appended to it. `admin_key`: what the server's
        administrator is known by. `log`: beside `directory` if not given. `policy`: a published
        system's.

        A busy machine is no fault: no request is refused for what it waits, no worker is taken for
        hung within a minute, and a drain may take three, unless `args` say otherwise."""
        self._headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._wrapper = wrapper
        self._settled = settled
        self._files = files
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = directory
        """Where segments go instead of /dev/shm, so that leftovers are seen."""
        self.log = log or directory.parent / f"{directory.name}-{self.port}.log"
        self._args = [
            "--catalog", str(catalog), "--port", str(self.port), "--slices", str(slices),
            "--pool-dir", str(directory), "--log-format", "json", "--gpu-slices", "none",
            "--patience", "1000", "--hang-timeout", "60", "--drain-timeout", "200",
            *(("--policy", policy) if policy else ("--burst", "1000")), *args,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | ForkedServer | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | ForkedServer:
        assert self._process is not None
        return self._process

    def __enter__(self) -> Self:
        self.directory.mkdir(exist_ok=True)
        self._process = self._start()
        try:
            self.wait_ready()
        except BaseException:  # `__exit__` is for what was entered
            self.process.kill()
            self.process.wait()
            raise
        return self

    def _start(self) -> subprocess.Popen[bytes] | ForkedServer:
        limit: list[str] = []
        if self._files is not None:
            limit = ["bash", "-c", f'ulimit -n {self._files}; exec "$0" "$@"']
        if not self._wrapper and _server_forks().can_start(self._args):
            return _server_forks().start(self._args, self.log, self._files)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [
                    *self._wrapper, *limit, sys.executable, "-m", "c2cserve.cli.main", "serve",
                    *self._args,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if error is not None:
            sys.stderr.write(self.log.read_text()[-6000:])

    def wait_ready(self, timeout_s: float = 200) -> None:
        """Every slice up and every model of the catalogue in the pool (or failed)."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log.read_text()[-4000:]}")
            try:
                state = self.state()
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
                continue
            settled = all(model["state"] in ("ready", "failed") for model in state["models"])
            if (settled or not self._settled) and all(s["state"] == "up" for s in state["slices"]):
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready:\n{self.log.read_text()[-4000:]}")

    def get(self, path: str, timeout_s: float = 60) -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def state(self) -> dict[str, Any]:
        status, text = self.get("/admin/state")
        assert status == 200, text
        return json.loads(text)

    def worker_pids(self) -> list[int]:
        return [s["pid"] for s in self.state()["slices"] if s["state"] == "up"]

    def children(self) -> list[int]:
        """Processes that the server started, by any of its threads."""
        return children_of(self.process.pid)

    def fork_servers(self) -> list[int]:
        """That process, if there is one, and those of its forks that the server has as children."""
        return children_of(self.process.pid, "c2cserve.serving.worker.process")

    def fork_server_pid(self) -> int:
        """The process of which workers are forks; all slices are up."""
        [pid] = set(self.fork_servers()) - set(self.worker_pids())
        return pid

    def memory_bytes(self) -> int:
        """Resident in the server's own process, at most so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    def logs(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def metric(self, pattern: str) -> float:
        """The sum of all samples whose name and labels match."""
        _, text = self.get("/metrics")
        values = re.findall(rf"^{pattern} ([0-9.e+-]+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


@contextmanager
def paused(pids: Sequence[int]) -> Generator[None]:
    """These processes stand still meanwhile: workers for less than `--hang-timeout`."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def wait_until(check: Any, timeout_s: float, what: str, poll_s: float = 0.05) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if check():
            return
        time.sleep(poll_s)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def texts(choices: Sequence[Any]) -> list[str]:
    return [choice.text for choice in choices]
