"""Relays of another process, which is killed, stands still and comes back: on emulated drivers."""

import ctypes
import mmap
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
import relay_process
from fake_cuda import FakeCuda

from c2cserve.transfer import relay_neighbours
from c2cserve.transfer.engine import LinkCounts, Ticket, TransferEngine
from c2cserve.transfer.gpus import open_on, serve_on
from c2cserve.transfer.moves import HOST, Port, Segment, ports_of
from c2cserve.transfer.relay_channel import GpuMemory, SharedMemory
from c2cserve.transfer.relay_neighbours import RelayNeighbours
from c2cserve.transfer.settings import Settings

SIZE = 12 << 20
SETTINGS = Settings(
    task_bytes=16 << 10, task_bytes_most=64 << 10, alone_bytes=64 << 10, depth=4,
    one_path_bytes=1 << 10, stall_s=0.05, pause_s=0.05,
)  # fmt: skip
LARGE_TASKS = Settings(
    task_bytes=5 << 20, task_bytes_most=5 << 20, depth=1, one_path_bytes=1 << 10, pause_s=0.05
)
"""A micro-task has several chunks."""
REMOTE = Port(1, "in")
PUMP_S = 1e-3


class SharedFile:
    """Memory that the other process maps too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["c2cserve.transfer.gpus"])
"""Processes begin with their imports done."""


@dataclass
class Neighbour:
    """The other process."""

    name: str
    library: Path
    process: Any = None

    def start(self) -> None:
        self._pipe, theirs = FORKS.Pipe()
        arguments = (self.name, str(self.library), theirs)
        self.process = FORKS.Process(target=relay_process.main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "up"

    def say(self, word: str) -> None:
        self._pipe.send(word)
        assert self._pipe.recv() == word

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        self._pipe.send("end")
        self.process.join(30)
        assert self.process.exitcode == 0


@dataclass
class Case:
    engine: TransferEngine
    cuda: FakeCuda
    neighbours: RelayNeighbours
    other: Neighbour
    source: SharedFile
    target: SharedFile
    ended: threading.Event = field(default_factory=threading.Event)

    def pump(self) -> None:
        while not self.ended.is_set():
            self.cuda.pump()
            time.sleep(PUMP_S)

    def submit(self, start: int = 0, stop: int = SIZE) -> Ticket:
        self.target.bytes[start:stop] = 0
        segment = Segment(
            self.target.address + start, self.source.address + start, stop - start, 0, HOST
        )
        return self.engine.submit([segment])

    def move(self, start: int = 0, stop: int = SIZE) -> None:
        assert self.engine.wait(self.submit(start, stop), 30)
        assert np.array_equal(self.target.bytes[start:stop], self.source.bytes[start:stop])

    @property
    def relayed(self) -> LinkCounts:
        return self.engine.counts()[REMOTE.name]

    def move_until_relayed(self) -> None:
        before = self.relayed.relayed_bytes
        eventually(lambda: self.move() or self.relayed.relayed_bytes > before)


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(1e-3)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(fake_cuda.build(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def case(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Case]:  # fmt: skip
    monkeypatch.setattr(relay_neighbours, "_RETRY_S", 0.02)
    ports, relays = ports_of([0], [], neighbours=[1])
    contexts = [None if port == REMOTE else 1 for port in ports]
    settings: Settings = getattr(request, "param", SETTINGS)
    engine = open_on(ports, relays, contexts, None, settings, driver=str(cuda.path))
    source, target = SharedFile(tmp_path / "segment"), SharedFile(tmp_path / "gpu")
    source.bytes[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    name = f"c2cserve-test.{os.getpid()}.{random.random()}"
    other = Neighbour(name, cuda.path)
    neighbours = RelayNeighbours(engine, {REMOTE: name})
    neighbours.opened(str(source.path), source.address, SIZE)
    neighbours.add_gpu(target.address, GpuMemory(str(target.path).encode(), 0, SIZE))
    made = Case(engine, cuda, neighbours, other, source, target)
    pumping = threading.Thread(target=made.pump)
    pumping.start()
    yield made
    neighbours.stop()
    engine.close()
    made.ended.set()
    pumping.join()
    if other.process is not None and other.process.is_alive():
        other.signal(signal.SIGCONT)
        other.kill()


def test_without_a_neighbour_there_is_one_path(case: Case) -> None:
    case.move()
    assert case.relayed.relayed_bytes == case.relayed.tasks == 0


def test_a_neighbour_that_comes_later_relays_and_one_that_ends_does_not(case: Case) -> None:
    case.move()
    case.other.start()
    case.move_until_relayed()
    case.other.end()
    eventually(lambda: case.move() or not case.neighbours._connections)
    before = case.relayed.relayed_bytes
    case.move()
    assert case.relayed.relayed_bytes == before
    case.other.start()
    case.move_until_relayed()


def test_a_neighbour_that_is_killed_costs_only_time(case: Case) -> None:
    """It is killed in the middle of relays, and another one takes its place."""
    for _ in range(2):
        case.other.start()
        case.move_until_relayed()
        case.other.say("hold")
        tickets = [case.submit(at, at + SIZE // 4) for at in range(0, SIZE, SIZE // 4)]
        case.other.kill()
        for ticket in tickets:
            assert case.engine.wait(ticket, 30)
        assert np.array_equal(case.target.bytes, case.source.bytes)
    assert case.relayed.resent > 0


@pytest.mark.parametrize("case", [LARGE_TASKS], indirect=True)
def test_micro_tasks_of_several_chunks_and_of_many_pieces(case: Case) -> None:
    case.other.start()
    case.move_until_relayed()
    for size in (64 << 10, (3 << 20) + 17):  # many in a chunk; chunks that end within a piece
        eventually(lambda size=size: relays_pieces(case, size))


def relays_pieces(case: Case, size: int) -> bool:
    """Move pieces in another order than they lie in, and return whether any was relayed."""
    before = case.relayed.relayed_bytes
    case.target.bytes[:] = 0
    starts = list(range(0, SIZE, size))
    random.Random(size).shuffle(starts)
    pieces = [
        Segment(case.target.address + at, case.source.address + at, min(size, SIZE - at), 0, HOST)
        for at in starts
    ]
    assert case.engine.wait(case.engine.submit(pieces), 30)
    assert np.array_equal(case.target.bytes, case.source.bytes)
    return case.relayed.relayed_bytes > before


def test_a_neighbour_that_stands_still_is_recalled_and_writes_nothing_late(case: Case) -> None:
    case.other.start()
    case.move_until_relayed()
    case.other.signal(signal.SIGSTOP)
    case.move()
    assert case.relayed.stalls > 0
    case.target.bytes[:] = 7
    case.other.signal(signal.SIGCONT)
    time.sleep(0.05)
    assert (case.target.bytes == 7).all()
    case.move_until_relayed()


def test_steps_that_read_over_the_link_come_first(case: Case) -> None:
    case.other.start()
    case.move_until_relayed()
    case.other.say("stream")
    case.move()  # what was outstanding when the flag was set is over
    before = case.relayed.relayed_bytes
    case.move()
    assert case.relayed.relayed_bytes == before
    case.other.say("rest")
    case.move_until_relayed()


def test_memory_that_is_not_shared_takes_the_direct_path(case: Case) -> None:
    case.other.start()
    case.move_until_relayed()
    case.neighbours.closed(str(case.source.path))
    before = case.relayed.relayed_bytes
    case.move()
    assert (case.relayed.relayed_bytes, case.relayed.errors) == (before, 0)
    case.neighbours.opened(str(case.source.path), case.source.address, SIZE)
    case.move_until_relayed()


def test_memory_that_the_neighbour_cannot_open_is_one_line_of_the_log(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.neighbours.opened("/missing", 4096, 4096)
    case.other.start()
    case.move_until_relayed()
    eventually(lambda: "does not relay a part of the memory" in caplog.text)
    case.neighbours.closed("/missing")


def test_a_stream_follows_relays_of_a_cancelled_transfer(case: Case) -> None:
    """Chunks that were begun end first; the neighbour's GPU may take its time for them."""
    case.other.start()
    case.move_until_relayed()
    stream = case.cuda.stream(0)
    for word in ("hold", "go"):
        case.other.say(word)
        ticket = case.submit()
        case.engine.cancel(ticket)
        going_on = threading.Timer(0.05, case.other.say, ["go"])
        going_on.start()
        case.engine.follow(ticket, stream)
        assert case.engine.wait(ticket, 30)
        after = case.target.bytes.copy()
        going_on.join()
        time.sleep(0.02)
        assert np.array_equal(case.target.bytes, after), "nothing is written late"
    eventually(lambda: case.cuda.destroy_if_idle(stream))


@pytest.mark.parametrize("kills", [2])
def test_many_transfers_with_checksums_beside_kills(case: Case, kills: int) -> None:
    rng = random.Random(kills)
    for _ in range(kills):
        case.other.start()
        case.move_until_relayed()
        victim = threading.Timer(rng.random() * 0.3, case.other.kill)
        victim.start()
        for _ in range(20):
            start = rng.randrange(SIZE // 2)
            case.move(start, start + rng.randrange(1, SIZE // 2))
        victim.join()
    case.move()
    assert case.relayed.relayed_bytes > 0


def test_an_engine_with_transfers_of_its_own_relays_nothing(cuda: FakeCuda) -> None:
    ports, relays = ports_of([0], [])
    engine = open_on(ports, relays, [1] * len(ports), None, SETTINGS, driver=str(cuda.path))
    channel = SharedMemory.create()
    server = serve_on(engine, 1, channel.address, driver=str(cuda.path))
    moving = ctypes.c_uint32.from_address(channel.address + 128)
    data = np.zeros(SIZE, np.uint8)
    segment = Segment(data.ctypes.data, data.ctypes.data, SIZE, 0, HOST)
    assert moving.value == 0
    ticket = engine.submit([segment])
    assert moving.value == 1

    def is_over() -> bool:
        cuda.pump()
        return engine.poll(ticket)

    eventually(is_over)
    eventually(lambda: moving.value == 0)
    server.set_streaming(True)
    assert ctypes.c_uint32.from_address(channel.address + 132).value == 1
    server.close()
    engine.close()
