"""The engine's thread and its methods, on links that are threads and copy this process's memory."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from thread_links import Stream, ThreadLinks

from c2cserve.transfer.engine import TransferEngine, TransferError
from c2cserve.transfer.moves import HOST, Segment
from c2cserve.transfer.schedule import Outstanding
from c2cserve.transfer.settings import Settings
from c2cserve.transfer.wake import Wake

SIZE = 100_000
SETTINGS = Settings(task_bytes=1000, one_path_bytes=2000, stall_s=0.02, pause_s=100.0)


@dataclass
class Case:
    links: ThreadLinks
    engine: TransferEngine[Stream]
    source: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    target: "np.ndarray[tuple[int], np.dtype[np.uint8]]"

    def segment(self, start: int, stop: int, gpu: int = 0) -> Segment:
        target, source = self.target.ctypes.data, self.source.ctypes.data
        return Segment(target + start, source + start, stop - start, gpu, HOST)

    def check(self, start: int = 0, stop: int = SIZE) -> None:
        assert np.array_equal(self.target[start:stop], self.source[start:stop])


@pytest.fixture
def case() -> Iterator[Case]:
    links = ThreadLinks(2)
    engine = TransferEngine(links, SETTINGS)
    source = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    yield Case(links, engine, source, np.zeros(SIZE, dtype=np.uint8))
    if not links.closed:
        engine.close()
    assert not links.held, "a stream stays held"


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
        ticket = case.engine.submit(mine, Stream(), hold=True)
        assert case.engine.wait(ticket, 20)

    threads = [threading.Thread(target=submit, args=(parts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    case.check()


def test_a_transfer_waits_for_its_stream_and_holds_it(case: Case) -> None:
    stream = Stream(is_open=False)
    ticket = case.engine.submit([case.segment(0, SIZE)], stream, hold=True)
    other = case.engine.submit([case.segment(0, 5000, 1)], Stream(), hold=True)
    assert case.engine.wait(other, 20), "it does not wait for the other's stream"
    assert not case.engine.poll(ticket)
    assert not case.target[5000:].any()
    assert case.links.held == set(stream.holds)
    stream.before.set()
    case.links.wake.post()  # as the driver does
    assert case.engine.wait(ticket, 20)
    case.check()
    assert not case.links.held


def test_a_stream_is_not_held_if_it_need_not_be(case: Case) -> None:
    stream = Stream(is_open=False)
    ticket = case.engine.submit([case.segment(0, SIZE)], stream)
    assert not stream.holds
    case.engine.cancel(ticket)
    assert case.engine.wait(ticket, 20)
    assert case.engine.state(ticket) == "cancelled"
    assert not case.target.any()


def test_small_transfers_are_one_copy(case: Case) -> None:
    ticket = case.engine.submit([case.segment(0, 500), case.segment(600, 2000)], Stream())
    assert case.engine.wait(ticket)
    assert case.engine.state(ticket) == "done"
    case.check(600, 2000)
    assert all(one.tasks == 0 for one in case.engine.counts().values())


@pytest.mark.parametrize("background", [False, True])
def test_nothing_is_moved_at_once(case: Case, background: bool) -> None:
    assert case.engine.wait(case.engine.submit([], background=background), 20)


def test_a_transfer_without_a_path_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="no path for in7"):
        case.engine.submit([case.segment(0, SIZE, 7)])


def test_a_relay_that_fails_costs_nothing_but_time(case: Case) -> None:
    case.links.failing = {"in1"}
    assert case.engine.wait(case.engine.submit([case.segment(0, SIZE)]), 20)
    case.check()
    assert case.engine.counts()["in1"].errors == 1


def test_a_relay_that_is_stuck_before_it_begins_is_sent_again(case: Case) -> None:
    case.links.stuck = {"in1"}
    ticket = case.engine.submit([case.segment(0, SIZE)], Stream(), hold=True)
    assert case.engine.wait(ticket, 20)
    case.check()
    counts = case.engine.counts()["in1"]
    assert (counts.relayed_bytes, counts.resent) == (0, 2)
    for one in stuck(case):  # it goes on, and sees that it was recalled
        case.links.end(one)


def test_a_relay_that_is_stuck_midway_is_waited_for(case: Case) -> None:
    """It may still write. Its transfer is not over before it is."""
    case.links.stuck = {"in1"}
    begun = threading.Event()
    start = case.links.start

    def start_and_note(one: Outstanding) -> None:
        if one.relayed:
            case.links.begun.add(one)
            begun.set()
        start(one)

    case.links.start = start_and_note
    ticket = case.engine.submit([case.segment(0, SIZE)])
    assert begun.wait(20)
    eventually(lambda: all(one.recalled for one in stuck(case)))
    assert not case.engine.wait(ticket, 0.05)
    for one in stuck(case):
        case.links.end(one)
    assert case.engine.wait(ticket, 20)
    case.check()


def stuck(case: Case) -> list[Outstanding]:
    schedule = case.engine._schedule
    return [one for port in schedule.ports for one in schedule.outstanding(port) if one.relayed]


def test_the_direct_path_fails_the_transfer_and_no_other(case: Case) -> None:
    case.links.failing = {"in0"}
    case.links.stuck = set()
    ticket = case.engine.submit([case.segment(0, SIZE)], Stream(), hold=True)
    with pytest.raises(TransferError, match="broken"):
        case.engine.wait(ticket, 20)
    case.links.failing = set()
    assert case.engine.wait(case.engine.submit([case.segment(0, SIZE)]), 20)
    case.check()


def test_closing_cancels_and_lets_go(case: Case) -> None:
    stream = Stream(is_open=False)
    ticket = case.engine.submit([case.segment(0, SIZE)], stream, hold=True)
    case.engine.close()
    assert case.engine.state(ticket) == "cancelled"
    assert not case.links.held
    with pytest.raises(TransferError, match="closed"):
        case.engine.submit([case.segment(0, SIZE)])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_thread_lets_go_of_all_streams(case: Case) -> None:
    def start(one: Outstanding) -> None:
        raise ZeroDivisionError("a defect")

    case.links.start = start
    ticket = case.engine.submit([case.segment(0, SIZE)], Stream(), hold=True)
    with pytest.raises(TransferError, match="a defect"):
        case.engine.wait(ticket, 20)
    assert not case.links.held
    with pytest.raises(TransferError, match="has failed"):
        case.engine.submit([case.segment(0, SIZE)])


def test_an_idle_engine_sleeps(case: Case) -> None:
    assert case.engine.wait(case.engine.submit([case.segment(0, SIZE)]), 20)
    waits: list[bool] = []
    wait = case.links.wake.wait
    case.links.wake.wait = lambda until_s=0.0: (waits.append(True), wait(until_s))[1]
    time.sleep(0.1)
    assert len(waits) <= 1


def test_posts_wake_once_and_limits_hold() -> None:
    wake = Wake()
    wake.post()
    wake.post()
    assert wake.wait()
    began_s = time.monotonic()
    assert not wake.wait(began_s + 0.02)
    assert time.monotonic() >= began_s + 0.02
    threading.Timer(0.02, wake.post).start()
    assert wake.wait(time.monotonic() + 20)
