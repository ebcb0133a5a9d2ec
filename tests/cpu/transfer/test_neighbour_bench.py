"""The benchmark of two workers without GPUs: kills of a relay on links that are a thread, and what
is made of the times that a worker writes."""

import random
from collections.abc import Iterator, Sequence

import neighbour_workers
import numpy as np
import pytest
from called_links import CalledEngine
from neighbour_workers import Phase, Steps, compared, cut, kills, parse_steps
from thread_links import ThreadLinks

from c2cserve.transfer.engine import LinkCounts, Ticket
from c2cserve.transfer.moves import HOST, Segment
from c2cserve.transfer.settings import Settings

SETTINGS = Settings(
    task_bytes=1000, task_bytes_most=2000, alone_bytes=1000, depth=2, one_path_bytes=0,
    stall_s=0.01, pause_s=0.01,
)  # fmt: skip


class ThreadSite:
    """A relay is killed: it stands still from then on. The next one is there after some looks."""

    size = 100_000

    def __init__(self) -> None:
        self.links = ThreadLinks()
        self.engine = CalledEngine(2, SETTINGS, self.links, threaded=True)
        self.source = np.random.default_rng(1).integers(0, 256, self.size, dtype=np.uint8)
        self.target = np.zeros(self.size, dtype=np.uint8)
        self._missing = 0

    def erase(self, start: int, stop: int) -> None:
        self.target[start:stop] = ~self.source[start:stop]

    def submit(self, pieces: Sequence[tuple[int, int]]) -> Ticket:
        near, far = self.target.ctypes.data, self.source.ctypes.data
        return self.engine.submit([Segment(near + a, far + a, b - a, 0, HOST) for a, b in pieces])

    def wait(self, ticket: Ticket) -> None:
        assert self.engine.wait(ticket, 30)

    def is_right(self, start: int, stop: int) -> bool:
        self._missing -= 1
        if not self._missing:
            self.revive()
        return np.array_equal(self.target[start:stop], self.source[start:stop])

    def revive(self) -> None:
        """What the dead relay had was sent again. It is over: the process is gone."""
        self.links.stuck.clear()
        for port in self.engine.ports:
            for task in self.engine.outstanding(port):
                if task.recalled:
                    self.links.end(task)

    def counts(self) -> LinkCounts:
        return self.engine.counts()["in1"]

    def kill(self) -> None:
        self.links.stuck.add("in1")
        self._missing = 3


@pytest.fixture
def site() -> Iterator[ThreadSite]:
    made = ThreadSite()
    yield made
    made.revive()
    made.engine.close()
    made.links.close()


def test_bytes_are_right_beside_kills(site: ThreadSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour_workers, "_UNTIL_KILL_S", 1e-4)
    found = kills(site, 40, 2, 20.0)
    assert found["transfers"] >= 40
    assert found["kills"] == 2
    assert found["wrong"] == 0
    assert found["relayed_gb"] > 0


def test_wrong_bytes_are_counted(site: ThreadSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "is_right", lambda start, stop: False)
    assert kills(site, 3, 0, 20.0)["wrong"] == 3


def test_pieces_cover_a_range_once() -> None:
    pieces = cut(1000, 50_000, random.Random(3))
    assert pieces != sorted(pieces)
    assert sum(stop - start for start, stop in pieces) == 49_000
    assert sorted(pieces)[0][0] == 1000


def test_only_steps_within_a_phase_count() -> None:
    lines = ["up\n", "0.1 0.4 0.010\n", "0.9 1.1 9.0\n", "1.2 1.4 0.011\n", "1.4 1.8 0.013\n"]
    steps = parse_steps(lines)
    assert steps[0] == Steps(0.1, 0.4, 0.010)
    found = compared(steps, [Phase(False, 0.0, 1.0), Phase(True, 1.0 + 0.15, 2.0)])
    assert found["alone_s"] == 0.010
    assert found["ratio"] == pytest.approx(1.2)
    assert found["rounds"] == [1, 2]
    with pytest.raises(ValueError, match="longer phases"):
        compared(steps, [Phase(False, 0.0, 1.0)])
