"""Workers that die slowly: the controller does not wait, and starts no successor before."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from descriptors import no_descriptors

from c2cserve.core.machine import Slice
from c2cserve.serving.controller import fleet as fleets
from c2cserve.serving.controller.fleet import Fleet, FleetDown, FleetSettings
from c2cserve.serving.controller.reserve import Reserve
from c2cserve.serving.controller.workers import Spawned, Worker, first_config
from c2cserve.serving.ipc.channel import Channel
from c2cserve.serving.ipc.messages import Quit
from c2cserve.serving.ipc.status_page import Field, StatusPage


class SlowToDie:
    """A worker that is killed at once and gone when the test says so."""

    made: list["SlowToDie"]

    def __init__(self, *_: object) -> None:
        self.pid, self.up = 4711 + len(self.made), True
        self.exit_code: int | None = None
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


class NotUsed:
    """A process that no worker was made of."""

    def end(self) -> None: ...


class NoSpawner:
    awaited_fd = None

    def __init__(self, timeout_s: float) -> None: ...

    def take(self) -> object:
        return NotUsed()

    def keep_ready(self) -> None: ...

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


def test_a_slice_waits_for_its_process_and_the_controller_does_not(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming: list[object] = [None, None, object()]
    monkeypatch.setattr(NoSpawner, "take", lambda _: coming.pop(0))
    slot = fleet.slots["s0"]
    for now in (0.0, 1.0):
        fleet.start_due(now)
        assert (slot.state, slot.restarts) == ("starting", 0)
    assert SlowToDie.made == []
    fleet.start_due(2.0)
    assert slot.state == "up"
    assert slot.started_s == 2.0


def test_starts_without_room_do_not_count_against_a_worker_that_then_came_up(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    slot, now = fleet.slots["s0"], 0.0
    fleet.start_due(now)
    list(fleet.reap(now))
    with monkeypatch.context() as full:
        full.setattr(fleets, "Worker", no_room)
        slot.worker = None
        for _ in range(5):
            fleet.start_due(now)
            now = slot.restart_at_s
    outage = fleet.outage(now - 0.1)
    assert outage is not None
    assert "No space left" in outage.reason
    fleet.start_due(now)
    list(fleet.reap(now))
    SlowToDie.made[-1].exit_code = -9
    assert [reason for _, reason in fleet.reap(now + 5.0)] == ["killed by signal 9"]
    assert fleet.outage(now + 5.0) is None
    assert slot.restart_at_s == now + 5.0, "its first death: the next one is started at once"


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


@pytest.fixture
def spawned(process: "subprocess.Popen[bytes]") -> Iterator[Spawned]:
    mine, its = socket.socketpair()
    with its:
        found = Spawned.watch(process, Channel(mine))
    yield found
    found.end()


def test_the_kernel_tells_which_process_is_exiting(spawned: Spawned) -> None:
    assert not spawned.ending
    spawned.process.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + 10.0
    while not spawned.ending:  # a zombie until it is reaped
        assert time.monotonic() < until_s
    spawned.process.wait()
    assert spawned.ending


def test_a_lack_of_descriptors_is_no_workers_death(spawned: Spawned) -> None:
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        assert not spawned.ending
        spawned.process.kill()
        spawned.process.wait()
        assert spawned.ending


def test_the_reserve_is_lent_and_kept() -> None:
    reserve = Reserve(4)
    held = len(os.listdir("/proc/self/fd"))
    with reserve.lent():
        assert len(os.listdir("/proc/self/fd")) == held - 4
        with no_descriptors():
            pass
    assert len(os.listdir("/proc/self/fd")) == held
    with no_descriptors(), reserve.lent():
        pass
    assert len(os.listdir("/proc/self/fd")) == held - 4, "nothing could be opened again"
    with reserve.lent():
        pass
    assert len(os.listdir("/proc/self/fd")) == held
    reserve.close()


class Starved(NoSpawner):
    """The resources that starting a process takes."""

    starved = True

    def take(self) -> object:
        if self.starved:
            raise OSError(errno.EMFILE, "Too many open files")
        return object()

    def keep_ready(self) -> None:
        self.take()


@pytest.fixture
def starved(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(Starved, "starved", True)
    monkeypatch.setattr(fleet, "_spawner", Starved(1.0))
    return fleet


def fail_for(fleet: Fleet, begin_s: float, seconds: float) -> float:
    """Kill each worker as soon as it is up; returns when that ends."""
    now = begin_s
    while now < begin_s + seconds:
        fleet.start_due(now)
        for worker in SlowToDie.made:
            worker.ending, worker.exit_code = True, -9
        list(fleet.reap(now))
        now += 0.25
    return now


def test_a_first_start_that_cannot_work_ends_the_fleet(starved: Fleet) -> None:
    starved.start_due(0.0)
    starved.start_due(0.25)
    assert starved.slots["s0"].restart_at_s == 2.25
    with pytest.raises(FleetDown, match=r"slice s0 does not start: .*Too many open files"):
        starved.start_due(2.25)


def test_once_up_a_slice_is_started_again_for_ever(
    starved: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Starved, "starved", False)
    assert starved.outage(0.0) is None
    now = fail_for(starved, 0.0, 200.0)
    slot = starved.slots["s0"]
    assert 8 <= len(SlowToDie.made) <= 12, "2, 4, 8, 16, then every 30 s"
    monkeypatch.setattr(Starved, "starved", True)
    for _ in range(1200):  # ten hours later the delay is still 30 s, and a number
        now = max(now, slot.restart_at_s)
        starved.start_due(now)
        assert 0.0 < slot.restart_at_s - now <= 30.0
    outage = starved.outage(now)
    assert outage is not None
    assert "Too many open files" in outage.reason
    assert 0.0 < outage.retry_s <= 30.0
    monkeypatch.setattr(Starved, "starved", False)
    starved.start_due(now + outage.retry_s)
    assert slot.state == "up"
    assert starved.outage(now + outage.retry_s) is None


def test_a_fork_server_that_cannot_start_is_tried_again(
    starved: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Starved, "starved", False)
    starved.start_due(0.0)
    monkeypatch.setattr(Starved, "starved", True)
    caplog.clear()
    for tick in range(80):
        starved.start_due(tick * 0.25)
    assert len(caplog.records) == 1, "it is said once"
    assert starved.slots["s0"].state == "up"


def test_a_page_is_memory_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        StatusPage(tmp_path / "page", create=True)
    assert list(tmp_path.iterdir()) == []


class Silent(SlowToDie):
    """Its last sign of life was at 0 s."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.page = dict.fromkeys(Field, 0.0)

    def hung(self, now: float, *limits: float) -> str | None:
        return Worker.hung(cast(Worker, self), now, *limits)

    def stalled_s(self, now: float) -> float:
        return 0.0


def test_a_pause_of_the_server_is_no_silence_of_its_workers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "Worker", Silent)
    fleet.start_due(0.0)
    for tick in range(10):
        assert list(fleet.reap(tick * 0.25)) == []
    assert list(fleet.reap(1000.0)) == [], "nobody was watched meanwhile"
    now = 1000.0
    while not (found := list(fleet.reap(now))):
        now += 0.25
    assert 1005.0 < now < 1006.0
    assert "no sign of life" in found[0][1]


def test_a_worker_that_died_of_a_suspected_request_is_replaced_at_once(fleet: Fleet) -> None:
    """The others' deaths count as before: its excuse forgives none of them."""
    slot = fleet.slots["s0"]
    delays: list[float] = []
    for excused in (False, False, True, True, False):
        fleet.start_due(1e6)
        assert slot.worker is not None
        slot.started_s = 10.0
        cast(SlowToDie, slot.worker).exit_code = -9
        for _ in fleet.reap(10.0):
            if excused:
                fleet.excuse("s0")
        delays.append(slot.restart_at_s - 10.0)
    assert delays == [0.0, 2.0, 0.0, 0.0, 4.0]
