"""Workers that take their time to die: nobody waits for them, and nobody takes their place."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from c2cserve.core.machine import Slice
from c2cserve.runtime.live import fleet as fleets
from c2cserve.runtime.live.fleet import Fleet, FleetSettings
from c2cserve.runtime.live.messages import Quit
from c2cserve.runtime.live.workers import Worker, first_config


class SlowToDie:
    """A worker that is killed at once and gone when the test says so."""

    made: list["SlowToDie"]

    def __init__(self, *_: object) -> None:
        self.pid, self.exit_code, self.up = 4711 + len(self.made), None, True
        self.ending = self.closed = False
        self.sent: list[object] = []
        self.made.append(self)

    def kill(self) -> None:
        self.ending = True

    def send(self, message: object) -> None:
        self.sent.append(message)

    def hung(self, now: float, *_: float) -> str | None:
        return "no sign of life" if now > 100.0 and self is self.made[0] else None

    def close(self) -> None:
        assert self.exit_code is not None, "closing waits for its end"
        self.closed = True


class NoSpawner:
    def take(self) -> None: ...

    def keep_spare(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fleet:
    SlowToDie.made = []
    monkeypatch.setattr(fleets, "Worker", SlowToDie)
    monkeypatch.setattr(fleets, "Spawner", NoSpawner)
    config = first_config(Slice("s0", "cpu", (0,)), "warning", "text", None)
    return Fleet([config], tmp_path / "x", FleetSettings())


def test_a_slice_waits_for_its_last_worker_and_the_controller_does_not(fleet: Fleet) -> None:
    fleet.start_due(0.0)
    [worker] = SlowToDie.made
    assert list(fleet.reap(50.0)) == []
    assert [reason for _, reason in fleet.reap(101.0)] == ["no sign of life"]
    fleet.start_due(101.0)
    assert fleet.slots["s0"].state == "lost"
    assert len(SlowToDie.made) == 1, "the device is not free yet"
    assert list(fleet.reap(101.5)) == [], "it is told of once"
    worker.exit_code = -9
    fleet.start_due(102.0)
    assert worker.closed
    assert fleet.slots["s0"].state == "up"
    assert len(SlowToDie.made) == 2


def test_one_on_its_way_out_is_dead_at_once(fleet: Fleet) -> None:
    fleet.start_due(0.0)
    SlowToDie.made[0].ending = True
    assert [reason for _, reason in fleet.reap(20.0)] == ["killed, and not gone yet"]


def test_a_shutdown_ends_those_that_are_leaving_too(fleet: Fleet) -> None:
    fleet.start_due(0.0)
    list(fleet.reap(101.0))
    SlowToDie.made[0].exit_code = -9
    fleet.close(0.0)
    assert SlowToDie.made[0].closed


def test_a_shutdown_tells_workers_that_are_up_and_kills_those_that_start(fleet: Fleet) -> None:
    fleet.start_due(0.0)
    [worker] = SlowToDie.made
    worker.up = False
    worker.exit_code = -9
    fleet.close(30.0)
    assert (worker.ending, worker.sent) == (True, [])


def test_workers_that_outlast_their_grace_are_all_killed_before_any_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class WaitedFor(SlowToDie):
        def close(self) -> None:
            assert all(worker.ending for worker in self.made), "one still runs"
            self.closed = True

    SlowToDie.made = []
    monkeypatch.setattr(fleets, "Worker", WaitedFor)
    monkeypatch.setattr(fleets, "Spawner", NoSpawner)
    slices = [Slice(f"s{i}", "cpu", (i,)) for i in range(3)]
    configs = [first_config(one, "warning", "text", None) for one in slices]
    fleet = Fleet(configs, tmp_path / "x", FleetSettings())
    fleet.start_due(0.0)
    fleet.close(0.05)
    assert [worker.sent for worker in SlowToDie.made] == [[Quit()]] * 3
    assert all(worker.closed for worker in SlowToDie.made)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    found = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield found
    found.kill()
    found.communicate()


def test_the_kernel_tells_who_is_on_his_way_out(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = object.__new__(Worker)
    monkeypatch.setattr(Worker, "pid", property(lambda self: process.pid))
    assert not worker.ending
    process.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + 10.0
    while not worker.ending:  # a zombie until somebody waits for it
        assert time.monotonic() < until_s
    process.wait()
    assert worker.ending
