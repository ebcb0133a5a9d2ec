"""Copies of weights in lent memory, with real threads and memory of this process for a GPU's."""

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.memory.peer_pool import Borrower, Lendable, PeerPool
from c2cserve.memory.places import Places
from c2cserve.policy.weights.hbm_residency import Residency
from c2cserve.policy.weights.lending import Lending

PIECE = 4096


class Memory:
    """A neighbour's; `gate` holds its copies back."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self.address, self.size = self._bytes.ctypes.data, size
        self.gate = threading.Event()
        self.gate.set()
        self.copying = threading.Event()

    def copy(self, target: int, source: int, size: int) -> None:
        assert self.address <= target <= target + size <= self.address + self.size
        self.copying.set()
        assert self.gate.wait(10)
        ctypes.memmove(target, source, size)
        self.copying.clear()


class Model:
    """Two pieces of weights in host memory."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.data = np.full(2 * PIECE, value, np.uint8)
        self.loaded = True
        address = self.data.ctypes.data
        self.weights = Lendable(address, ((0, PIECE), (PIECE, 2 * PIECE)), lambda: self.loaded)
        self.parts = [
            WeightHandle(address + i * PIECE, (PIECE // 64, 32), "bfloat16", "host")
            for i in range(2)
        ]


class Mark:
    """Work under way that reads what it was launched with."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waited = threading.Event()

    def synchronize(self) -> None:
        self.waited.set()
        assert self.over.wait(10)


def reader_of(pool: PeerPool, marks: list[Mark], *, busy: bool = False) -> Borrower:
    def mark() -> Mark:
        marks.append(Mark())
        if not busy:
            marks[-1].over.set()
        return marks[-1]

    return Borrower(pool, mark)


def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline, f"not within 10 s: {what}"
        time.sleep(0.005)


def bytes_of(w: WeightHandle) -> set[int]:
    return set(ctypes.string_at(w.pointer, w.bytes))


def test_weights_are_read_there_once_they_are_loaded_copied_and_looked_for() -> None:
    memory, model = Memory(4 * PIECE), Model(7)
    pool = PeerPool([memory], Lending(memory.size))
    reader = reader_of(pool, [])
    model.loaded = False
    pool.add("m", model.weights)
    time.sleep(0.05)
    assert pool.bytes == 0, "not before all of it is loaded"
    model.loaded = True
    until(lambda: pool.bytes == 2 * PIECE, "copied")
    part = model.parts[1]
    assert reader.source(part) == part, "a launch goes on with the view it began with"
    changes = reader.changes
    reader.refresh()
    assert reader.changes > changes
    there = reader.source(part)
    assert (there.home, there.shape, bytes_of(there)) == ("peer", part.shape, {7})
    assert memory.address <= there.pointer < memory.address + memory.size


def test_a_model_that_leaves_is_read_at_home_and_its_host_memory_let_go() -> None:
    memory, model, other = Memory(2 * PIECE), Model(7), Model(8)
    pool = PeerPool([memory], Lending(memory.size))
    reader = reader_of(pool, [])
    memory.gate.clear()
    pool.add("m", model.weights)
    assert memory.copying.wait(10)
    left = threading.Thread(target=pool.remove, args=("m",))
    left.start()
    time.sleep(0.05)
    assert left.is_alive(), "a copy under way still reads its memory"
    memory.gate.set()
    left.join(10)
    assert not left.is_alive()
    reader.refresh()
    assert reader.source(model.parts[0]).home == "host"
    pool.add("other", other.weights)
    until(lambda: pool.bytes == 2 * PIECE, "its places are free again")
    reader.refresh()
    assert bytes_of(reader.source(other.parts[0])) == {8}


def test_a_place_is_not_written_while_a_reader_may_still_read_it() -> None:
    memory, cold, hot = Memory(2 * PIECE), Model(1), Model(2)
    pool = PeerPool([memory], Lending(memory.size))
    marks: list[Mark] = []
    reader = reader_of(pool, marks, busy=True)
    pool.add("cold", cold.weights)
    until(lambda: pool.bytes == 2 * PIECE, "copied")
    reader.refresh()
    reading = reader.source(cold.parts[0])
    pool.add("hot", hot.weights)
    until(lambda: not pool._loading, "known")
    pool.used("hot")
    until(lambda: pool.bytes < 2 * PIECE, "a piece has to go")
    time.sleep(0.05)
    assert bytes_of(reading) == {1}, "the reader has not looked"
    reader.refresh()
    assert marks[-1].waited.wait(10)
    assert bytes_of(reading) == {1}, "what it launched before still runs"
    assert reader.source(cold.parts[0]).home == "host"
    marks[-1].over.set()

    def done() -> bool:
        reader.refresh()
        for mark in marks:
            mark.over.set()
        return all(reader.source(part).home == "peer" for part in hot.parts)

    until(done, "the hot model is there")
    assert {*bytes_of(reader.source(hot.parts[0]))} == {2}
    assert reader.source(cold.parts[1]).home == "host"


def test_a_reader_that_removes_a_model_while_it_is_waited_for_is_not_waited_for_for_ever() -> None:
    memory, cold, hot = Memory(2 * PIECE), Model(1), Model(2)
    pool = PeerPool([memory], Lending(memory.size))
    reader = reader_of(pool, [])
    pool.add("cold", cold.weights)
    until(lambda: pool.bytes == 2 * PIECE, "copied")
    reader.refresh()
    pool.add("hot", hot.weights)
    until(lambda: not pool._loading, "known")
    pool.used("hot")
    until(lambda: pool.bytes < 2 * PIECE, "a piece has to go")
    pool.remove("hot")  # on the reader's thread: it cannot look meanwhile

    def back() -> bool:
        reader.refresh()
        return all(reader.source(part).home == "peer" for part in cold.parts)

    until(back, "the cold model has its places again")
    assert bytes_of(reader.source(cold.parts[0])) == {1}


def test_models_lie_with_several_neighbours() -> None:
    memories, model = [Memory(PIECE), Memory(PIECE)], Model(5)
    pool = PeerPool(memories, Lending(2 * PIECE))
    pool.add("m", model.weights)
    until(lambda: pool.bytes == 2 * PIECE, "copied")
    reader = reader_of(pool, [])
    for part, memory in zip(model.parts, memories, strict=True):
        assert reader.source(part).pointer == memory.address


def test_the_cache_of_near_weights_keeps_its_keys_wherever_weights_are_read() -> None:
    memory, model = Memory(2 * PIECE), Model(3)
    pool = PeerPool([memory], Lending(memory.size))
    reader = reader_of(pool, [])
    cache = HbmCache(torch.zeros(PIECE, dtype=torch.uint8), Residency(PIECE), reader)
    first, second = model.parts
    cache.add("m", model.weights.address, 2 * PIECE)
    cache.begin_step("m", 0.0, 0)
    assert cache.place(first) is not None
    changes = cache.changes
    pool.add("m", model.weights)
    until(lambda: pool.bytes == 2 * PIECE, "copied")
    reader.refresh()
    assert cache.changes > changes
    assert cache.location(first).home == "hbm", "nearer still"
    assert cache.location(second).home == "peer"
    assert cache.counts.peer_bytes == 0
    assert cache.find(second) is None
    assert cache.source(second).home == "peer"
    assert (cache.counts.streamed_bytes, cache.counts.peer_bytes) == (PIECE, PIECE)
    cache.forget("m")
    assert cache.location(first).home == "peer"


def test_places_are_apart_and_come_back() -> None:
    places = Places(1000)
    assert (places.take(300), places.take(300)) == (0, 512)
    assert places.take(300) is None
    places.free(0)
    assert (places.take(256), places.take(256)) == (0, 256)
    assert places.take(104) is None, "what is behind 812 begins at 1024"
    with pytest.raises(ValueError, match="no place begins at 7"):
        places.free(7)
