"""SIGTERM of a server that has nothing to do: over at once, with nothing left behind."""

import signal
import time
from pathlib import Path

import pytest
from run_delays import DelayWatch
from server_process import ServerProcess, wait_until

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
