"""Loads of weights and copies of KV, submitted to the engine: on links that are a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from called_links import CalledEngine
from thread_links import Stream, ThreadLinks
from torch import Tensor

from c2cserve.core.actions import Direction
from c2cserve.engine.gpu.kv_copies import KvCopies, joined
from c2cserve.engine.gpu.load_transfers import LoadTransfers
from c2cserve.engine.gpu.peers import _Lent
from c2cserve.engine.gpu.weight_loads import LoadCopy
from c2cserve.memory.host_blocks import CopyRun
from c2cserve.transfer.engine import TransferError
from c2cserve.transfer.moves import HOST, Segment, SegmentColumns, pack
from c2cserve.transfer.settings import Settings

SIZE = 60_000
GPU = torch.device("cuda", 0)
SETTINGS = Settings(
    task_bytes=1000, task_bytes_most=2000, alone_bytes=1000, peer_bytes=1000, depth=2,
    one_path_bytes=2000, stall_s=100.0,
)  # fmt: skip


@dataclass
class Case:
    links: ThreadLinks
    engine: CalledEngine
    woken: threading.Semaphore

    def wake(self) -> None:
        self.woken.release()

    def wait_for_wake(self) -> None:
        assert self.woken.acquire(timeout=20)


@pytest.fixture(params=[1, 2])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    links = ThreadLinks()
    engine = CalledEngine(request.param, SETTINGS, links, threaded=True)
    yield Case(links, engine, threading.Semaphore(0))
    links.streams.closed.clear()
    engine.stop()  # notifiers may still wait for tickets
    links.close()


def memory(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (SIZE,), dtype=torch.uint8, generator=generator)


def loads_of(case: Case, lanes: list[Stream]) -> LoadTransfers:
    return LoadTransfers(case.engine, GPU, cast("Any", lanes), case.wake, lambda _: 0)


def copy_of(target: Tensor, source: Tensor) -> LoadCopy:
    return LoadCopy(target.data_ptr(), source.data_ptr(), source.numel(), "host")


def test_a_load_begins_after_the_resident_lane_and_wakes_its_slice(case: Case) -> None:
    lane, other = (case.links.streams.make(is_open=False) for _ in range(2))
    loads, source, target = loads_of(case, [lane, other]), memory(1), torch.zeros(SIZE).byte()
    ticket = loads.submit([copy_of(target, source)])
    assert not loads.is_over(ticket)
    [mark] = loads.marks()
    case.links.streams.closed.discard(lane.cuda_stream)
    case.wait_for_wake()
    assert loads.is_over(ticket), "it does not wait for the other lane"
    mark.synchronize()
    loads.synchronize()
    assert torch.equal(target, source)
    assert loads.moved_bytes(ticket) == SIZE
    second = loads.submit([copy_of(target[:100], source[:100])])
    case.wait_for_wake()
    assert loads.is_over(second)
    assert len(loads.marks()) == 1, "those that are over are forgotten"


@pytest.mark.parametrize("size", [1500, SIZE], ids=["small", "large"])
def test_steps_are_held_while_a_cancelled_load_may_still_write(case: Case, size: int) -> None:
    lanes = [case.links.streams.make()]
    loads, source, target = loads_of(case, lanes), memory(1)[:size], torch.zeros(size).byte()
    ticket = loads.submit([copy_of(target, source)])
    loads.cancel(ticket)
    loads.hold_steps(ticket)
    case.wait_for_wake()
    moved, after = loads.moved_bytes(ticket), target.clone()
    assert moved <= size
    loads.synchronize()
    assert torch.equal(target, after), "nothing is written once it is over"


def test_a_load_from_a_neighbour_names_its_gpu(case: Case) -> None:
    if len(case.engine.ports) < 4:
        pytest.skip("there is one GPU")
    loads = LoadTransfers(
        case.engine, GPU, cast("Any", [case.links.streams.make()]), case.wake, lambda _: 1
    )
    source, target = memory(1), torch.zeros(SIZE).byte()
    loads.submit([replace_home(copy_of(target, source))])
    case.wait_for_wake()
    assert torch.equal(target, source)
    assert case.engine.counts()["peer1to0"].direct_bytes == SIZE


def replace_home(copy: LoadCopy) -> LoadCopy:
    return copy._replace(home="peer")


def test_a_link_that_fails_is_met_by_who_asks(case: Case) -> None:
    case.links.failing = {"in0", "in1"}
    loads = loads_of(case, [case.links.streams.make()])
    ticket = loads.submit([copy_of(torch.zeros(SIZE).byte(), memory(1))])
    case.wait_for_wake()
    with pytest.raises(TransferError, match="broken"):
        loads.is_over(ticket)


# ---- KV -----------------------------------------------------------------------------------------


def kv_of(case: Case, arena: Tensor, host: Tensor, stream: Stream) -> KvCopies:
    there = SimpleNamespace(device=GPU, data_ptr=arena.data_ptr)
    parts = [cast("Any", one) for one in (there, host, None, stream)]
    return KvCopies(case.engine, parts[0], parts[1], parts[2], parts[3], case.wake)


def test_kv_goes_both_ways_at_once_in_pieces(case: Case) -> None:
    arena, host = memory(1), memory(2)
    expected_arena, expected_host = arena.clone(), host.clone()
    kv = kv_of(case, arena, host, case.links.streams.make())
    half, piece = SIZE // 2, 1500
    out = tuple(range(0, half - piece, 2 * piece))
    back = tuple(range(half, SIZE - piece, 2 * piece))
    for number, at in enumerate(out):
        expected_host[number * piece :][:piece] = arena[at : at + piece]
    for number, at in enumerate(back):
        expected_arena[at : at + piece] = host[half + number * piece :][:piece]
    runs = [CopyRun(out, 0, piece)], [CopyRun(back, half, piece)]
    tests = [kv(runs[0], "copy"), kv(runs[1], "in")]
    for _ in tests:
        case.wait_for_wake()
    assert all(is_over() for is_over in tests)
    assert torch.equal(arena, expected_arena)
    assert torch.equal(host, expected_host)


@pytest.mark.parametrize("direction", ["in", "out", "copy"])
def test_only_what_is_written_to_the_arena_waits_for_steps(
    case: Case, direction: Direction
) -> None:
    steps = case.links.streams.make(is_open=False)
    kv = kv_of(case, memory(1), memory(2), steps)
    is_over = kv([CopyRun((0,), 0, SIZE)], direction)
    if direction != "in":
        case.wait_for_wake()
    assert is_over() == (direction != "in")
    case.links.streams.closed.clear()
    eventually(is_over)


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(1e-3)


def test_blocks_that_follow_one_another_are_one_copy() -> None:
    runs = [
        CopyRun((0, 10, 20, 40, 50), 100, 10), CopyRun((), 3, 10), CopyRun((60,), 150, 5),
        CopyRun((65, 70), 200, 5), CopyRun((90,), 210, 10),
    ]  # fmt: skip
    columns = [column.tolist() for column in joined(runs)]
    assert columns == [[0, 40, 65, 90], [100, 130, 200, 210], [30, 25, 10, 10]]
    assert all(len(column) == 0 for column in joined([]))
    assert all(len(column) == 0 for column in joined(runs[1:2]))


def test_segments_by_column_are_those_of_rows() -> None:
    rows = [Segment(7, 1, 3, 0, HOST), Segment(9, 5, 2, 0, HOST)]
    columns = [np.array(column) for column in ((7, 9), (1, 5), (3, 2))]
    assert SegmentColumns(*columns, 0, HOST).packed() == pack(rows)
    none = np.zeros(0, np.int64)
    assert SegmentColumns(none, none, none, 0, HOST).packed() == pack([])


# ---- lending ------------------------------------------------------------------------------------


def test_copies_to_a_neighbour_are_over_when_the_call_returns(case: Case) -> None:
    source, target = memory(1), torch.zeros(SIZE).byte()
    lent = SimpleNamespace(device=GPU, data_ptr=target.data_ptr, numel=target.numel)
    neighbour = _Lent(cast("Any", lent), case.engine)
    neighbour.copy(neighbour.address, source.data_ptr(), neighbour.size)
    assert torch.equal(target, source)
