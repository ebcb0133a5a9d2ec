"""Loads of GPU 0 over the link of GPU 1, which another process owns. It is killed and stopped.

`pytest -m gpu -s tests/gpu/test_neighbour_relays.py` prints the rates."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from c2cserve.memory.pinning import pin_array
from c2cserve.transfer.engine import LinkCounts, Ticket, TransferEngine
from c2cserve.transfer.gpus import export_memory, open_engine
from c2cserve.transfer.moves import HOST, Port, Segment
from c2cserve.transfer.relay_neighbours import RelayNeighbours

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour"),
]

SIZE = 1 << 30
REMOTE = Port(1, "in")
WORKER = Path(__file__).with_name("relay_worker.py")


@dataclass
class Case:
    engine: TransferEngine
    neighbours: RelayNeighbours
    name: str
    host: Tensor
    gpu: Tensor
    workers: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start(self, *options: str) -> "subprocess.Popen[str]":
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), self.name, *options], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.workers.append(worker)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "up\n"
        return worker

    def submit(self, start: int = 0, stop: int = SIZE) -> Ticket:
        segment = Segment(
            self.gpu.data_ptr() + start, self.host.data_ptr() + start, stop - start, 0, HOST
        )
        return self.engine.submit([segment])

    def move(self) -> float:
        """Move all bytes, and return how many a second. They are checked on the GPU."""
        self.gpu.zero_()
        torch.cuda.synchronize(0)
        begun_s = time.monotonic()
        assert self.engine.wait(self.submit(), 60)
        took_s = time.monotonic() - begun_s
        self.check()
        return SIZE / took_s

    def check(self) -> None:
        step = 1 << 28
        for at in range(0, SIZE, step):
            there = self.host[at : at + step].to("cuda:0")
            assert torch.equal(self.gpu[at : at + step], there)

    @property
    def relayed(self) -> LinkCounts:
        return self.engine.counts()[REMOTE.name]

    def move_until_relayed(self) -> None:
        before = self.relayed.relayed_bytes
        eventually(lambda: self.move() > 0 and self.relayed.relayed_bytes > before)


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(1e-2)


@pytest.fixture
def case() -> Iterator[Case]:
    path = Path(f"/dev/shm/c2cserve-test.{os.getpid()}.{random.random()}")
    engine = open_engine([0], neighbours=[1])
    path.write_bytes(b"")
    os.truncate(path, SIZE)
    host = torch.from_file(str(path), shared=True, size=SIZE, dtype=torch.uint8)
    host.random_(0, 256)
    region = pin_array(host.numpy())
    gpu = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    name = f"c2cserve-test.{os.getpid()}.{random.random()}"
    neighbours = RelayNeighbours(engine, {REMOTE: f"{name}.1"})
    made = Case(engine, neighbours, name, host, gpu)
    neighbours.opened(str(path), host.data_ptr(), SIZE)
    neighbours.add_gpu(gpu.data_ptr(), export_memory(gpu.data_ptr(), SIZE))
    yield made
    neighbours.stop()
    engine.close()
    for worker in made.workers:
        worker.kill()
        worker.communicate()
    region.close()
    path.unlink()


def show(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")


def test_two_links_are_faster_than_one(case: Case) -> None:
    alone = max(case.move() for _ in range(3))
    case.start()
    case.move_until_relayed()
    both = max(case.move() for _ in range(5))
    show(f"one link {alone / 1e9:.1f} GB/s, and another worker's {both / 1e9:.1f}")
    assert both > 1.1 * alone
    assert case.relayed.stalls == 0


def test_a_worker_that_is_killed_costs_only_time(case: Case) -> None:
    for _ in range(2):
        worker = case.start()
        case.move_until_relayed()
        for delay_s in (0.0, 0.003, 0.006):
            ticket = case.submit()
            time.sleep(delay_s)
            if delay_s:
                worker.kill()
            assert case.engine.wait(ticket, 60)
            case.check()
        worker.communicate()


def test_a_worker_that_stands_still_is_recalled(case: Case) -> None:
    worker = case.start()
    case.move_until_relayed()
    worker.send_signal(signal.SIGSTOP)
    case.move()
    case.move()
    case.gpu.fill_(7)
    torch.cuda.synchronize(0)
    worker.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert bool((case.gpu == 7).all()), "something was written late"
    case.move_until_relayed()
    show(f"{case.relayed}")


def test_relays_beside_a_worker_that_computes(case: Case) -> None:
    worker = case.start("compute")
    assert worker.stdout is not None
    alone = [float(worker.stdout.readline()) for _ in range(10)][3:]
    case.move_until_relayed()
    rates = [case.move() for _ in range(20)]
    beside = [float(worker.stdout.readline()) for _ in range(10)]
    show(
        f"{max(rates) / 1e9:.1f} GB/s; products a second: {max(alone):.0f} alone,"
        f" {min(beside):.0f} to {max(beside):.0f} beside relays (checks of bytes included)"
    )


def test_many_transfers_with_checks_beside_kills(case: Case) -> None:
    rng = random.Random(1)
    for _ in range(5):
        worker = case.start()
        case.move_until_relayed()
        kill_at = rng.randrange(40)
        for number in range(40):
            start = rng.randrange(SIZE // 2)
            stop = start + rng.randrange(16 << 20, SIZE // 2)
            case.gpu[start:stop] = 0
            torch.cuda.synchronize(0)
            ticket = case.submit(start, stop)
            if number == kill_at:
                time.sleep(rng.random() * 5e-3)
                worker.kill()
            assert case.engine.wait(ticket, 60)
            there = case.host[start:stop].to("cuda:0")
            assert torch.equal(case.gpu[start:stop], there)
        worker.communicate()
    show(f"{case.relayed}")
