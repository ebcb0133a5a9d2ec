"""A member's slice runs in the GPU's shared process, and they abort together."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import msgspec
import pytest

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.serving.controller.workers import Spawned, Spawner
from c2cserve.serving.ipc.messages import WorkerConfig
from c2cserve.serving.ipc.status_page import StatusPage
from c2cserve.serving.worker.shared_gpu_process import (
    SharedGpuProcess,
    join_shared_process,
    open_shared_process,
)

_NAMES = count()
MEMBER = """
import socket, sys
from c2cserve.serving.worker.shared_gpu_process import join_shared_process
channel = socket.socket(fileno=int(sys.argv[2]))
print(join_shared_process(sys.argv[1], b"killed", channel), flush=True)
"""
SHARED = """
import os, sys, time
from c2cserve.serving.worker.shared_gpu_process import open_shared_process
def serve(config, channel):
    channel.sendall(b"in")
    time.sleep(60)
shared = open_shared_process(sys.argv[1], serve, lambda: os._exit(1))
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
        self.aborted = threading.Event()

    def open(self, name: str) -> SharedGpuProcess:
        shared = open_shared_process(name, self.serve, self.aborted.set)
        assert shared is not None
        return shared

    def serve(self, config: bytes, channel: socket.socket) -> None:
        channel.sendall(b"I am " + config)
        if channel.recv(99) == b"fail":
            raise RuntimeError("as told")


Channel = tuple[socket.socket, socket.socket]


def join(
    name: str, threads: ThreadPoolExecutor, channel: Channel
) -> tuple[socket.socket, Future[int | None]]:
    """Join as a member whose slice then serves. Return the controller's end of its channel, and its
    exit status once the slice has ended."""
    mine, its = channel
    status = threads.submit(join_shared_process, name, b"one", its)
    assert mine.recv(99) == b"I am one"
    return mine, status


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


def test_members_run_in_the_shared_process_until_their_slices_end(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    slices = Slices()
    shared = slices.open(name)
    assert open_shared_process(name, slices.serve, slices.aborted.set) is None
    long = b"x" * 300_000
    for i, (_, its) in enumerate(channels):
        threads.submit(join_shared_process, name, b"slice %d" % i if i else long, its)
    said = b""
    while len(said) < 5 + len(long):
        said += channels[0][0].recv(1 << 20)
    assert said == b"I am " + long
    for i in (1, 2):
        assert channels[i][0].recv(99) == b"I am slice %d" % i
    for mine, _ in channels:
        mine.sendall(b"quit")
    shared.close()
    assert not slices.aborted.is_set()
    slices.open(name).close()


def test_a_member_learns_how_its_slice_ended(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    slices = Slices()
    shared = slices.open(name)
    mine, status = join(name, threads, channels[0])
    mine.sendall(b"quit")
    assert status.result(10) == 0
    shared.close()


def test_a_slice_that_fails_takes_the_shared_process_with_it(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    slices = Slices()
    shared = slices.open(name)
    mine, _ = join(name, threads, channels[0])
    mine.sendall(b"fail")
    assert slices.aborted.wait(10)
    shared.close()


def test_a_killed_member_takes_the_shared_process_with_it(
    name: str, channels: list[Channel]
) -> None:
    slices = Slices()
    shared = slices.open(name)
    mine, its = channels[0]
    command = [sys.executable, "-c", MEMBER, name, str(its.fileno())]
    with subprocess.Popen(command, pass_fds=[its.fileno()]) as member:
        assert mine.recv(99) == b"I am killed"
        assert not slices.aborted.is_set()
        member.kill()
    assert slices.aborted.wait(10)
    mine.sendall(b"quit")
    shared.close()


def test_a_shared_process_that_dies_ends_its_members(
    name: str, threads: ThreadPoolExecutor, channels: list[Channel]
) -> None:
    with subprocess.Popen([sys.executable, "-c", SHARED, name], stdout=subprocess.PIPE) as shared:
        assert shared.stdout is not None
        assert shared.stdout.readline() == b"open\n"
        mine, its = channels[0]
        status = threads.submit(join_shared_process, name, b"one", its)
        assert mine.recv(99) == b"in"
        shared.kill()
    assert status.result(10) == 1
    assert join_shared_process(name, b"one", its) is None


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_parts_of_a_gpu_that_is_not_there_end_together_and_say_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pages: list[StatusPage] = []
    with closing(Spawner(60.0)) as spawner:
        workers = [taken(spawner) for _ in range(2)]
        for part, worker in enumerate(workers):  # once both are there
            pages.append(StatusPage(tmp_path / f"status.{part}", create=True))
            share = GpuShare(f"GPU-{tmp_path.name}", 16, part, 2)
            cpus = tuple(os.sched_getaffinity(0))
            slice_ = Slice(f"gpu0.{part}", "green", cpus, slab_bytes=16 << 20, gpu=share)
            config = WorkerConfig(slice_, 1, str(pages[-1].path), "info", "text")
            worker.channel.send(msgspec.json.encode(config))
        statuses = [worker.process.wait() for worker in workers]
        for worker in workers:
            worker.end()
    # The shared process exits with 3 and its member with 1; a later one becomes another shared one.
    assert sorted(statuses) in ([1, 3], [3, 3])
    assert "cannot start: torch finds no GPU" in capfd.readouterr().err


def taken(spawner: Spawner) -> Spawned:
    while (spawned := spawner.take()) is None:
        assert select.select([spawner.awaited_fd], [], [], 60.0)[0], "no answer"
    return spawned
