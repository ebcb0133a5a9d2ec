"""Transfers of GPU 0 over the link of GPU 1, which another process owns: for the benchmarks and the
tests of relays between workers."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from c2cserve.memory.pinning import pin_array
from c2cserve.transfer.engine import LinkCounts, Ticket, TransferEngine
from c2cserve.transfer.gpus import export_memory, open_engine
from c2cserve.transfer.moves import HOST, Port, Segment
from c2cserve.transfer.relay_neighbours import RelayNeighbours

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
        """Start a worker, and wait until it relays."""
        worker = self.launch(*options)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "up\n"
        return worker

    def launch(self, *options: str) -> "subprocess.Popen[str]":
        """Start a worker, which is found when it relays."""
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), self.name, *options], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def submit(self, start: int = 0, stop: int = SIZE) -> Ticket:
        return self.submit_pieces([(start, stop)])

    def submit_pieces(self, pieces: Sequence[tuple[int, int]]) -> Ticket:
        """Move ranges of bytes, each to the place that it has at its source."""
        near, far = self.gpu.data_ptr(), self.host.data_ptr()
        return self.engine.submit(
            [Segment(near + start, far + start, stop - start, 0, HOST) for start, stop in pieces]
        )

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


@contextmanager
def opened_case() -> Iterator[Case]:
    """An engine of GPU 0, a segment, memory of that GPU, and no worker yet."""
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
    try:
        yield made
    finally:
        neighbours.stop()
        engine.close()
        for worker in made.workers:
            worker.kill()
            worker.communicate()
        region.close()
        path.unlink()
