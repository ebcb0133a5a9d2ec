"""Slices under one roof: a lodger's slice runs in the house's process, and they fall together."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import msgspec
import pytest

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.serving.ipc.channel import Channel as WorkerChannel
from c2cserve.serving.ipc.messages import WorkerConfig
from c2cserve.serving.ipc.status_page import StatusPage
from c2cserve.serving.worker.shared_gpu_process import lodge, open_house

_NAMES = count()
LODGER = """
import socket, sys
from c2cserve.serving.worker.shared_gpu_process import lodge
print(lodge(sys.argv[1], b"killed", socket.socket(fileno=int(sys.argv[2]))), flush=True)
"""
HOUSE = """
import os, sys, time
from c2cserve.serving.worker.shared_gpu_process import open_house
def serve(config, channel):
    channel.sendall(b"in")
    time.sleep(60)
house = open_house(sys.argv[1], serve, lambda: os._exit(1))
print("open", flush=True)
time.sleep(60)
"""


@pytest.fixture
def name() -> str:
    return f"c2cserve-test.{os.getpid()}.{next(_NAMES)}"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Slices:
    """Says its configuration to the controller, and quits when told to."""

    def __init__(self) -> None:
        self.fell = threading.Event()

    def serve(self, config: bytes, channel: socket.socket) -> None:
        channel.sendall(b"I am " + config)
        if channel.recv(99) == b"fail":
            raise RuntimeError("as told")


Channel = tuple[socket.socket, socket.socket]


@pytest.fixture
def channels() -> Iterator[list[Channel]]:
    """The controller's end and the worker's, of three slices."""
    pairs = [socket.socketpair() for _ in range(3)]
    for mine, _ in pairs:
        mine.settimeout(10)
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


def test_lodgers_run_in_the_house_until_their_slices_end(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    slices = Slices()
    house = open_house(name, slices.serve, slices.fell.set)
    assert house is not None
    assert open_house(name, slices.serve, slices.fell.set) is None
    long = b"x" * 300_000
    for i, (_, its) in enumerate(channels):
        threads.submit(lodge, name, b"slice %d" % i if i else long, its)
    said = b""
    while len(said) < 5 + len(long):
        said += channels[0][0].recv(1 << 20)
    assert said == b"I am " + long
    for i in (1, 2):
        assert channels[i][0].recv(99) == b"I am slice %d" % i
    for mine, _ in channels:
        mine.sendall(b"quit")
    house.close()
    assert not slices.fell.is_set()
    again = open_house(name, slices.serve, slices.fell.set)
    assert again is not None
    again.close()


def test_a_lodger_learns_how_its_slice_ended(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    slices = Slices()
    house = open_house(name, slices.serve, slices.fell.set)
    assert house is not None
    mine, its = channels[0]
    status = threads.submit(lodge, name, b"one", its)
    assert mine.recv(99) == b"I am one"
    mine.sendall(b"quit")
    assert status.result(10) == 0
    house.close()


def test_a_slice_that_fails_takes_the_house_with_it(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    slices = Slices()
    house = open_house(name, slices.serve, slices.fell.set)
    assert house is not None
    mine, its = channels[0]
    threads.submit(lodge, name, b"one", its)
    assert mine.recv(99) == b"I am one"
    mine.sendall(b"fail")
    assert slices.fell.wait(10)
    house.close()


def test_a_killed_lodger_takes_the_house_with_it(name: str, channels: list[Channel]) -> None:
    slices = Slices()
    house = open_house(name, slices.serve, slices.fell.set)
    assert house is not None
    mine, its = channels[0]
    command = [sys.executable, "-c", LODGER, name, str(its.fileno())]
    with subprocess.Popen(command, pass_fds=[its.fileno()]) as lodger:
        assert mine.recv(99) == b"I am killed"
        assert not slices.fell.is_set()
        lodger.kill()
    assert slices.fell.wait(10)
    mine.sendall(b"quit")
    house.close()


def test_a_house_that_dies_ends_its_lodgers(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    with subprocess.Popen([sys.executable, "-c", HOUSE, name], stdout=subprocess.PIPE) as house:
        assert house.stdout is not None
        assert house.stdout.readline() == b"open\n"
        mine, its = channels[0]
        status = threads.submit(lodge, name, b"one", its)
        assert mine.recv(99) == b"in"
        house.kill()
    assert status.result(10) == 1
    assert lodge(name, b"one", its) is None


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_parts_of_a_gpu_that_is_not_there_end_together_and_say_why(
    tmp_path: Path, channels: list[Channel]
) -> None:
    workers: list[subprocess.Popen[bytes]] = []
    pages: list[StatusPage] = []
    told: list[tuple[Channel, bytes]] = []
    for part, (mine, its) in enumerate(channels[:2]):
        pages.append(StatusPage(tmp_path / f"status.{part}", create=True))
        share = GpuShare(f"GPU-{tmp_path.name}", 16, part, 2)
        cpus = tuple(os.sched_getaffinity(0))
        slice_ = Slice(f"gpu0.{part}", "green", cpus, slab_bytes=16 << 20, gpu=share)
        config = WorkerConfig(slice_, 1, str(pages[-1].path), "info", "text")
        command = [sys.executable, "-m", "c2cserve.cli.main", "worker"]
        workers.append(subprocess.Popen(command, stdin=its.fileno(), stderr=subprocess.PIPE))
        told.append((mine, msgspec.json.encode(config)))
    for mine, config in told:  # once both are there
        WorkerChannel(mine).send(config)
    said = [worker.communicate(timeout=60)[1].decode() for worker in workers]
    # Who opened the house says 3, its lodger 1; who came after its end opened another.
    assert sorted(worker.returncode for worker in workers) in ([1, 3], [3, 3])
    assert any("can not start: torch finds no GPU" in text for text in said)
