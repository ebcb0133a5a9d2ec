"""The links of GPUs on an emulated driver: what is called, in which order, on which stream."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, FakeStream, install

from c2cserve.kernels.gpu.driver import CudaError
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.gpu.flags import Flags, Holds
from c2cserve.transfer.gpu.links import GpuLinks, open_engine
from c2cserve.transfer.moves import HOST, Segment
from c2cserve.transfer.settings import Settings

SIZE = 1 << 20
SETTINGS = Settings(task_bytes=1 << 14, one_path_bytes=1 << 10, stall_s=0.02, pause_s=100.0)


@dataclass
class Case:
    driver: FakeDriver
    engine: TransferEngine[Any]
    links: GpuLinks
    source: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    target: "np.ndarray[tuple[int], np.dtype[np.uint8]]"

    def segment(self, start: int = 0, stop: int = SIZE, *, inward: bool = True) -> Segment:
        ends = (0, HOST) if inward else (HOST, 0)
        target, source = self.target.ctypes.data, self.source.ctypes.data
        return Segment(target + start, source + start, stop - start, *ends)

    def until(self, condition: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < limit_s
            self.driver.pump()
            time.sleep(1e-4)

    def relay_streams(self) -> list[int]:
        return [int(slot.stream) for slot in self.links._relay_slots.values()]


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    fake = install(monkeypatch, gpus=2)
    engine = open_engine([0, 1], SETTINGS)
    links = engine._links
    assert isinstance(links, GpuLinks)
    source = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    yield Case(fake, engine, links, source, np.zeros(SIZE, dtype=np.uint8))
    fake.pump()
    closing = threading.Thread(target=engine.close)
    closing.start()
    while closing.is_alive():
        fake.pump()
        closing.join(1e-3)
    assert not fake._memory, "flags are freed"
    assert not fake.context, "every context was popped"


@pytest.mark.parametrize("inward", [True, False])
def test_both_paths_carry_bytes(case: Case, inward: bool) -> None:
    warm = case.driver.launches
    ticket = case.engine.submit([case.segment(inward=inward)])
    case.until(lambda: case.engine.poll(ticket))
    assert np.array_equal(case.target, case.source)
    counts = case.engine.counts()
    own, neighbour = ("in0", "in1") if inward else ("out0", "out1")
    assert counts[own].direct_bytes + counts[neighbour].relayed_bytes == SIZE
    assert case.driver.copies == counts[own].tasks > 0
    assert case.driver.launches > warm


def test_segments_are_grouped(case: Case) -> None:
    ticket = case.engine.submit([case.segment(at, at + 100) for at in range(0, SIZE, 200)])
    case.until(lambda: case.engine.poll(ticket))
    expected = np.where(np.arange(SIZE) % 200 < 100, case.source, 0)
    assert np.array_equal(case.target, expected)
    assert case.driver.copies == 0
    assert case.driver.batches > 0
    assert case.driver.launches > 0


@pytest.mark.parametrize("stop", [1000, SIZE], ids=["one copy", "micro-tasks"])
def test_stream_order(case: Case, stop: int) -> None:
    """What comes before is seen, what comes after waits."""
    stream = FakeStream(case.driver, 0)
    ready, seen = threading.Event(), list[bytes]()
    case.driver.enqueue(stream.cuda_stream, ready.is_set)
    ticket = case.engine.submit([case.segment(0, stop)], stream, hold=True)
    case.driver.enqueue(stream.cuda_stream, lambda: seen.append(case.target.tobytes()))
    for _ in range(20):
        case.driver.pump()
        time.sleep(1e-3)
    assert not case.target.any()
    case.source[:stop] = 7
    ready.set()
    case.until(lambda: bool(seen))
    assert case.engine.wait(ticket, 20)
    assert seen == [bytes([7] * stop + [0] * (SIZE - stop))]


def test_a_single_copy_that_holds_no_stream(case: Case) -> None:
    stream = FakeStream(case.driver, 0)
    ready = threading.Event()
    case.driver.enqueue(stream.cuda_stream, ready.is_set)
    ticket = case.engine.submit([case.segment(0, 1000)], stream)
    assert len(case.driver.streams[stream.cuda_stream]) == 2, "what it had, and an event"
    case.driver.pump()
    assert not case.engine.poll(ticket)
    ready.set()
    case.until(lambda: case.engine.poll(ticket))
    assert np.array_equal(case.target[:1000], case.source[:1000])


def test_stalled_relays_are_recalled_and_write_nothing(case: Case) -> None:
    go_on = threading.Event()
    for stream in case.relay_streams():
        case.driver.enqueue(stream, go_on.is_set)
    ticket = case.engine.submit([case.segment()])
    case.until(lambda: case.engine.poll(ticket))
    assert np.array_equal(case.target, case.source)
    assert case.engine.counts()["in1"].resent == 2
    case.target[:] = 9
    go_on.set()
    case.driver.pump()
    assert (case.target == 9).all()


@pytest.mark.parametrize("inward", [True, False])
def test_host_memory_that_is_not_pinned_is_refused(case: Case, inward: bool) -> None:
    host = case.source if inward else case.target
    case.driver.unpinned = [(host.ctypes.data, host.ctypes.data + SIZE)]
    with pytest.raises(ValueError, match="is not pinned"):
        case.engine.submit([case.segment(inward=inward)])
    assert not case.target.any()


def test_a_launch_that_fails_is_sent_again(case: Case) -> None:
    case.driver.failing = set(case.relay_streams())
    ticket = case.engine.submit([case.segment()])
    case.until(lambda: case.engine.poll(ticket))
    assert np.array_equal(case.target, case.source)
    assert case.engine.counts()["in1"].errors == 1


def test_holds_are_used_again_for_higher_values(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpus=1)
    flags = Flags(2)
    holds = Holds(flags, 2)
    first, second = holds.take(), holds.take()
    with pytest.raises(CudaError, match="2 streams are held already"):
        holds.take()
    holds.let_go(first[0])
    assert (flags[first[0]], flags[second[0]]) == (1, 0)
    number, address, value = holds.take()
    assert (number, address, value) == (first[0], first[1], 2)
    flags.close()
