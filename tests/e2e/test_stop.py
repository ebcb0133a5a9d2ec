"""SIGTERM of a server that has nothing to do: over at once, with nothing left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from run_delays import DelayWatch
from server_process import ServerProcess, alive, wait_until

pytestmark = pytest.mark.alone

LIMIT_S = 2.0


class Listening(ServerProcess):
    """Handed over when it listens, before any of its workers is up."""

    def wait_ready(self, timeout_s: float = 200) -> None:
        wait_until(
            lambda: self.log.exists() and " models, " in self.log.read_text(), timeout_s,
            "listening", 0.01,
        )  # fmt: skip


@pytest.mark.parametrize("kind", [ServerProcess, Listening], ids=["idle", "starting"])
def test_a_server_without_requests_ends_at_once(kind: type[ServerProcess], tmp_path: Path) -> None:
    with kind(directory=tmp_path / "pool") as server:
        with DelayWatch([server.process.pid, *server.children()]) as delayed:
            began_s = time.monotonic()
            server.signal(signal.SIGTERM)
            assert server.wait(30) == 0
            took_s = time.monotonic() - began_s
        assert took_s - delayed.seconds < LIMIT_S, "without what it waited for a processor"
        assert server.leftovers() == []


class WithoutWorkers(Listening):
    """Of which workers are forks does not run: none of them comes up."""

    def wait_ready(self, timeout_s: float = 200) -> None:
        wait_until(self._hold, timeout_s, "the process of which workers are forks", 0.005)
        super().wait_ready(timeout_s)

    def _hold(self) -> bool:
        held = self.fork_servers()
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        return bool(held)


def test_ctrl_c_before_anything_could_be_answered_is_an_interrupted_start(tmp_path: Path) -> None:
    with WithoutWorkers(directory=tmp_path / "pool") as server:
        children = server.children()
        server.signal(signal.SIGINT)
        assert server.wait(60) == 130
        assert server.log.read_text().splitlines()[-1] == "c2cserve: interrupted"
        assert server.leftovers() == []
        wait_until(lambda: not any(alive(pid) for pid in children), 5, "its children to end", 0.01)


def test_ctrl_c_drains_a_server_that_serves(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path / "pool", slices=1) as server:
        server.signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert server.leftovers() == []
