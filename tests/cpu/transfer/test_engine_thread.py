"""The engine's thread and methods, on links that are a thread and copy this process's memory."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from called_links import CalledEngine, Task
from thread_links import ThreadLinks

from c2cserve.kernels.native import KernelsMissing
from c2cserve.transfer import library
from c2cserve.transfer.engine import TransferError
from c2cserve.transfer.moves import HOST, Segment, pack
from c2cserve.transfer.settings import Settings, Urgency

SIZE = 100_000
SETTINGS = Settings(
    task_bytes=1000, task_bytes_most=2000, alone_bytes=1000, depth=2, one_path_bytes=2000,
    stall_s=0.02, pause_s=100.0,
)  # fmt: skip


@dataclass
class Case:
    links: ThreadLinks
    engine: CalledEngine
    source: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    target: "np.ndarray[tuple[int], np.dtype[np.uint8]]"

    def segment(self, start: int, stop: int, gpu: int = 0) -> Segment:
        target, source = self.target.ctypes.data, self.source.ctypes.data
        return Segment(target + start, source + start, stop - start, gpu, HOST)

    def check(self, start: int = 0, stop: int = SIZE) -> None:
        assert np.array_equal(self.target[start:stop], self.source[start:stop])

    def stuck(self) -> list[Task]:
        tasks = [one for port in self.engine.ports for one in self.engine.outstanding(port)]
        return [one for one in tasks if one.relayed]


@pytest.fixture
def case() -> Iterator[Case]:
    links = ThreadLinks()
    engine = CalledEngine(2, SETTINGS, links, threaded=True)
    source = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    yield Case(links, engine, source, np.zeros(SIZE, dtype=np.uint8))
    links.streams.closed.clear()
    engine.close()
    links.close()


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(1e-3)


def test_bytes_arrive_over_two_links(case: Case) -> None:
    ticket = case.engine.submit([case.segment(0, SIZE)])
    assert case.engine.wait(ticket, 20)
    case.check()
    counts = case.engine.counts()
    assert counts["in0"].direct_bytes + counts["in1"].relayed_bytes == SIZE
    assert case.engine.state(ticket) == "done"


def test_many_threads_submit_many_small_segments(case: Case) -> None:
    bounds = [0, *sorted({int(x) for x in np.random.default_rng(2).integers(0, SIZE, 300)}), SIZE]
    parts = [case.segment(a, b, b % 2) for a, b in pairwise(bounds)]

    def submit(mine: list[Segment]) -> None:
        ticket = case.engine.submit(pack(mine), case.links.streams.make())
        assert case.engine.wait(ticket, 20)

    threads = [threading.Thread(target=submit, args=(parts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    case.check()


def test_a_transfer_waits_for_its_stream_and_no_other(case: Case) -> None:
    stream = case.links.streams.make(is_open=False)
    ticket = case.engine.submit([case.segment(0, SIZE)], stream)
    other = case.engine.submit([case.segment(0, 5000, 1)], case.links.streams.make())
    assert case.engine.wait(other, 20), "it does not wait for the other's stream"
    assert not case.engine.poll(ticket)
    assert not case.target[5000:].any()
    case.links.streams.closed.clear()
    assert case.engine.wait(ticket, 20)
    case.check()


def test_a_transfer_is_cancelled_before_its_stream_comes_to_it(case: Case) -> None:
    stream = case.links.streams.make(is_open=False)
    ticket = case.engine.submit([case.segment(0, SIZE)], stream)
    case.engine.cancel(ticket)
    assert case.engine.wait(ticket, 20)
    assert case.engine.state(ticket) == "cancelled"
    assert not case.target.any()


def test_small_transfers_are_one_copy(case: Case) -> None:
    segments = [case.segment(0, 500), case.segment(600, 2000)]
    ticket = case.engine.submit(segments, case.links.streams.make())
    assert case.engine.wait(ticket)
    assert case.engine.state(ticket) == "done"
    case.check(600, 2000)
    assert all(one.tasks == 0 for one in case.engine.counts().values())
    assert case.engine.counts()["in0"].direct_bytes == case.engine.moved_bytes(ticket) == 1900


@pytest.mark.parametrize("urgency", Urgency)
def test_nothing_is_moved_at_once(case: Case, urgency: Urgency) -> None:
    assert case.engine.wait(case.engine.submit([], urgency=urgency), 20)


def test_transfers_without_a_path_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="no path for a segment from -1 to 7"):
        case.engine.submit([case.segment(0, SIZE, 7)])
    with pytest.raises(ValueError, match="takes no link"):
        case.engine.submit([Segment(0, 0, 1, HOST, HOST)])
    with pytest.raises(ValueError, match="0 bytes or more"):
        case.engine.submit([Segment(0, 0, -1, 0, HOST)])


def test_a_relay_that_fails_costs_nothing_but_time(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.links.failing = {"in1"}
    assert case.engine.wait(case.engine.submit([case.segment(0, SIZE)]), 20)
    case.check()
    assert case.engine.counts()["in1"].errors == 1
    assert "in1 relays no more: broken" in caplog.text


def test_a_relay_that_is_stuck_before_it_begins_is_sent_again(case: Case) -> None:
    case.links.stuck = {"in1"}
    ticket = case.engine.submit([case.segment(0, SIZE)])
    assert case.engine.wait(ticket, 20)
    case.check()
    counts = case.engine.counts()["in1"]
    assert (counts.relayed_bytes, counts.resent) == (0, 2)
    for one in case.stuck():  # it goes on, and sees that it was recalled
        case.links.end(one)
    eventually(lambda: not case.stuck())


def test_a_relay_that_is_stuck_midway_is_waited_for(case: Case) -> None:
    """It may still write. Its transfer is not over before it is."""
    case.links.stuck, case.links.begin_when_stuck = {"in1"}, True
    ticket = case.engine.submit([case.segment(0, SIZE)])
    eventually(lambda: bool(case.stuck()) and all(one.recalled for one in case.stuck()))
    assert not case.engine.wait(ticket, 0.05)
    for one in case.stuck():
        case.links.end(one)
    assert case.engine.wait(ticket, 20)
    case.check()


def test_the_direct_path_fails_the_transfer_and_no_other(case: Case) -> None:
    case.links.failing = {"in0"}
    ticket = case.engine.submit([case.segment(0, SIZE)])
    with pytest.raises(TransferError, match="broken"):
        case.engine.wait(ticket, 20)
    case.links.failing = set()
    assert case.engine.wait(case.engine.submit([case.segment(0, SIZE)]), 20)
    case.check()


def test_closing_cancels(case: Case) -> None:
    stream = case.links.streams.make(is_open=False)
    ticket = case.engine.submit([case.segment(0, SIZE)], stream)
    case.engine.close()
    assert case.engine.state(ticket) == "cancelled"
    with pytest.raises(TransferError, match="closed"):
        case.engine.submit([case.segment(0, SIZE)])


def test_tickets_that_are_dropped_are_moved(case: Case) -> None:
    for start in range(0, SIZE, 10_000):
        case.engine.submit([case.segment(start, start + 10_000)])
    gc.collect()
    eventually(lambda: np.array_equal(case.target, case.source))


def test_an_idle_engine_sleeps(case: Case) -> None:
    assert case.engine.wait(case.engine.submit([case.segment(0, SIZE)]), 20)
    eventually(lambda: not any(case.engine.outstanding(port) for port in case.engine.ports))
    looks, cpu_s = case.links.looks, time.process_time()
    time.sleep(0.1)
    assert case.links.looks == looks
    assert time.process_time() - cpu_s < 0.05


def test_an_engine_that_waits_long_looks_seldom(case: Case) -> None:
    """No more than once in a millisecond, when nothing has changed for some time."""
    case.engine.submit([case.segment(0, SIZE)], case.links.streams.make(is_open=False))
    time.sleep(0.05)
    looks, began_s = case.links.looks, time.monotonic()
    time.sleep(0.1)
    assert case.links.looks - looks <= 2e3 * (time.monotonic() - began_s) + 10


def test_a_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(library, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(KernelsMissing, match=r"python -m c2cserve\.kernels\.build"):
        library.library.__wrapped__()


class SlowLook(ThreadLinks):
    """The second micro-task is slow, and the look that finds its end is slower."""

    def __init__(self) -> None:
        super().__init__()
        self.starts_s: list[float] = []

    def start(self, task: Task) -> None:
        self.starts_s.append(time.monotonic())
        super().start(task)

    def is_over(self, task: Task) -> bool:
        if len(self.starts_s) == 2:
            if time.monotonic() < self.starts_s[-1] + 0.02:
                return False
            time.sleep(0.2)
        return super().is_over(task)


def test_a_pause_that_ends_during_a_turn_is_not_slept_through() -> None:
    """After a slow background micro-task its link pauses. Nothing else is under way then."""
    links = SlowLook()
    engine = CalledEngine(1, SETTINGS, links, threaded=True)
    source, target = (np.full(4000, fill, dtype=np.uint8) for fill in (7, 0))
    segment = Segment(target.ctypes.data, source.ctypes.data, 4000, 0, HOST)
    ticket = engine.submit([segment], urgency=Urgency.LENDING)
    assert engine.wait(ticket, 20, spins=False)
    assert np.array_equal(source, target)
    engine.close()
    links.close()
