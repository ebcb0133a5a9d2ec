"""Registrations of host memory: whole pages, in pieces that meet at borders, none left over."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from fake_registrar import FakeRegistrar
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.kernels.gpu.host_borders import BORDER_BYTES
from c2cserve.memory.gradual_pinning import PAUSE_S, GradualRegion, Pinner, Span
from c2cserve.memory.pinning import PinnedRegion, PinningError, page_pieces

PAGE = 4096
PIECE = 4 * PAGE
BASE = 1000 * PIECE


def until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(1e-4)


def mapped(address: int, size: int) -> None:
    """Pages that are there."""


def slept(seconds: float) -> None:
    """A pause that takes no time."""


def pinner_of(registrar: FakeRegistrar) -> Pinner:
    return Pinner(registrar, piece_bytes=PIECE, sleep=slept)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 22), st.integers(1, 64))
def test_pieces_are_whole_pages_that_meet_at_borders(address: int, size: int, pages: int) -> None:
    most = pages * PAGE
    pieces = list(page_pieces(address, size, most, most))
    assert pieces[0][0] <= address < pieces[0][0] + PAGE
    assert 0 <= sum(pieces[-1]) - (address + size) < PAGE
    for (start, length), (following, _) in pairwise(pieces):
        assert start + length == following
        assert following % most == 0
    assert all(at % PAGE == length % PAGE == 0 < length <= most for at, length in pieces)


GIB = 1 << 30


@pytest.mark.parametrize(("gigabytes", "registrations"), [(1, 1), (32, 1), (33, 2), (90, 3)])
def test_what_is_registered_at_once_has_borders_only_if_it_must(
    gigabytes: int, registrations: int
) -> None:
    """Copies that nothing cuts stay within one registration where memory is not that large."""
    registrar = FakeRegistrar()
    region = PinnedRegion(96 * GIB - PAGE, gigabytes * GIB, registrar)
    assert len(registrar.log) == registrations
    assert all((at + size) % BORDER_BYTES == 0 for at, size in registrar.log[:-1])
    assert registrar.bytes == gigabytes * GIB
    region.close()
    assert not registrar.registered


def test_a_failure_in_the_middle_leaves_nothing_registered_at_once() -> None:
    registrar = FakeRegistrar(fails_at=2)
    with pytest.raises(PinningError, match="cudaErrorMemoryAllocation"):
        PinnedRegion(96 * GIB - PAGE, 90 * GIB, registrar)
    assert len(registrar.log) == 2
    assert not registrar.registered


@st.composite
def regions(draw: st.DrawFn) -> tuple[int, int, list[Span]]:
    """Draw an address, a size and the order in which spans are needed."""
    address = BASE + draw(st.integers(0, 3)) * PAGE
    size = draw(st.integers(1, 12 * PIECE))
    ends = st.integers(0, size)
    spans = draw(st.lists(st.tuples(ends, ends).map(lambda ab: (min(ab), max(ab))), max_size=4))
    return address, size, spans


@given(regions())
def test_pieces_come_once_in_the_order_of_need_and_are_readable_from_then_on(
    drawn: tuple[int, int, list[Span]],
) -> None:
    address, size, order = drawn
    registrar = FakeRegistrar()
    region = GradualRegion(address, size, mapped, order, PIECE)
    needed = list(order)
    while not region.complete:
        assert not region.idle
        for start, stop in order:
            there = all(
                any(a <= at < a + n for a, n in registrar.registered.items())
                for at in range(address + start, address + stop, PAGE)
            )
            if region.readable((start, stop)):
                assert there
        while needed and region.readable(needed[0]):
            needed.pop(0)
        region.advance(registrar)
        if needed:  # nothing comes before what is needed next
            start, stop = needed[0]
            at, length = registrar.log[-1]
            assert at < address + stop
            assert at + length > address + start
    assert registrar.log == sorted(registrar.log) or order
    assert sorted(registrar.log) == list(page_pieces(address, size, PIECE, PIECE))
    assert region.readable((0, size))
    region.closing = True
    while not region.idle:
        region.advance(registrar)
    assert not registrar.registered
    assert not region.readable((0, size))


def test_pages_are_mapped_before_the_driver_takes_its_locks() -> None:
    registrar, told = FakeRegistrar(), list[tuple[int, int]]()

    def maps(address: int, size: int) -> None:
        assert address not in registrar.registered
        told.append((address, size))

    region = GradualRegion(BASE, 3 * PIECE, maps, (), PIECE)
    while not region.complete:
        region.advance(registrar)
    assert told == registrar.log


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_failure_in_the_middle_is_one_clear_fault_and_leaves_nothing(fails_at: int) -> None:
    registrar = FakeRegistrar(fails_at)
    pinner = pinner_of(registrar)
    region = pinner.open(BASE, 5 * PIECE, mapped)
    with pytest.raises(PinningError, match=r"cudaHostRegister.*cudaErrorMemoryAllocation"):
        region.wait()
    pinner.finish()
    assert not region.complete
    assert len(registrar.registered) == fails_at
    assert len(registrar.log) == fails_at, "it is not tried again"
    pinner.close(region)
    pinner.finish()
    assert not registrar.registered
    registrar.fails_at = None
    pinner.open(BASE, PIECE, mapped).wait()  # the thread goes on


def test_pages_that_cannot_be_mapped_are_a_fault() -> None:
    def maps(address: int, size: int) -> None:
        raise OSError(5, "madvise: Input/output error")

    registrar = FakeRegistrar()
    with pytest.raises(PinningError, match="madvise"):
        pinner_of(registrar).open(BASE, PIECE, maps).wait()
    assert not registrar.registered


def test_closing_midway_registers_no_more_and_takes_all_back() -> None:
    registrar = FakeRegistrar()
    registrar.gate = threading.Semaphore(2)
    pinner = pinner_of(registrar)
    region = pinner.open(BASE, 9 * PIECE, mapped)
    until(lambda: len(registrar.log) == 2)
    pinner.close(region)
    with pytest.raises(PinningError, match="closed meanwhile"):
        region.wait()
    registrar.gate.release()
    pinner.finish()
    assert len(registrar.log) <= 3
    assert not registrar.registered


def test_what_somebody_waits_for_comes_first() -> None:
    registrar = FakeRegistrar()
    registrar.gate = threading.Semaphore(1)
    pinner = pinner_of(registrar)
    pinner.open(BASE, 3 * PIECE, mapped)
    urgent = pinner.open(2 * BASE, 2 * PIECE, mapped)
    urgent.wanted = True
    registrar.gate.release(8)
    pinner.finish()
    places = [at // BASE for at, _ in registrar.log]
    assert places.index(2) <= 2, "one piece may have been begun, and one been chosen"
    assert places[places.index(2) :][:2] == [2, 2]
    assert len(places) == 5


@pytest.mark.parametrize("computes", [True, False])
def test_there_are_pauses_only_while_steps_are_in_flight(computes: bool) -> None:
    registrar, slept_s = FakeRegistrar(), list[float]()
    pinner = Pinner(registrar, lambda: computes, piece_bytes=PIECE, sleep=slept_s.append)
    region = pinner.open(BASE, 4 * PIECE, mapped)
    region.wait()
    pinner.close(region)
    pinner.finish()
    until(lambda: len(slept_s) == (8 if computes else 0))
    assert set(slept_s) <= {PAUSE_S}


def test_regions_of_many_threads_are_all_registered_and_all_taken_back() -> None:
    registrar = FakeRegistrar()
    pinner = pinner_of(registrar)

    def use(number: int) -> None:
        for turn in range(5):
            region = pinner.open((number * 5 + turn + 1) * BASE, 7 * PIECE, mapped)
            if turn % 2:
                region.wait()
                assert region.readable((0, 7 * PIECE))
            pinner.close(region)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    pinner.finish()
    assert not registrar.registered
