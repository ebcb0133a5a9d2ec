"""The transfer engine on GPUs: right bytes, in stream order, whatever happens to relays."""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from relay_launch import RelayLaunch
from torch import Tensor
from transfer_faults import stalling

from c2cserve.kernels.gpu.aot.variants import RELAY
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.gpus import open_engine
from c2cserve.transfer.moves import HOST, Segment
from c2cserve.transfer.settings import RelayShape, Settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SIZE = 64 << 20
ONLY_TASKS = Settings(task_bytes=128 << 10, task_bytes_most=1 << 20, one_path_bytes=0)
"""Small micro-tasks, so that relays have their part in small transfers too."""
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour")
LINKS = [1, pytest.param(2, marks=needs_two)]
SHAPES = [
    pytest.param(RelayShape(), id="ring"),
    pytest.param(RelayShape(stages=3, stage_bytes=1024), id="small ring"),
    pytest.param(RelayShape(ctas=1, stages=16, stage_bytes=4096), id="one CTA"),
]
_SLEEP_CYCLES = 100_000_000
"""About 50 ms."""


@dataclass
class Case:
    engine: TransferEngine
    links: int
    host: Tensor
    gpu: Tensor

    def inward(self, target: int = 0, source: int = 0, size: int = SIZE) -> Segment:
        return Segment(self.gpu.data_ptr() + target, self.host.data_ptr() + source, size, 0, HOST)

    def outward(self, target: int = 0, source: int = 0, size: int = SIZE) -> Segment:
        return Segment(self.host.data_ptr() + target, self.gpu.data_ptr() + source, size, HOST, 0)

    def move(self, segments: list[Segment], stream: torch.cuda.Stream | None = None) -> None:
        assert self.engine.wait(self.engine.submit(segments, stream), 60)


def opened(
    links: int, settings: Settings = ONLY_TASKS, own: RelayShape | None = None
) -> Iterator[Case]:
    made = open_engine(range(links), settings, own=own)
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    host.copy_(noise())
    gpu = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    yield Case(made, links, host, gpu)
    made.close()
    for number in range(links):
        torch.cuda.synchronize(number)


@pytest.fixture(params=LINKS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield from opened(request.param)


@pytest.fixture
def pair() -> Iterator[Case]:
    yield from opened(2)


@pytest.fixture(scope="module")
def kernels_pair() -> Iterator[Case]:
    """For many tests that write to the GPU's memory only."""
    yield from opened(2)


@cache
def noise(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (SIZE,), dtype=torch.uint8, generator=generator)


def relayed_bytes(case: Case) -> int:
    return sum(one.relayed_bytes for one in case.engine.counts().values())


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_large_transfer(case: Case, direction: str) -> None:
    if direction == "in":
        case.move([case.inward()])
    else:
        case.gpu.copy_(case.host)
        case.host.zero_()
        torch.cuda.synchronize()
        case.move([case.outward()])
    assert torch.equal(case.host, case.gpu.cpu())
    assert torch.equal(case.host, noise())
    assert relayed_bytes(case) > 0 or case.links == 1, "one GPU has no neighbour"


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("seed", range(6))
def test_random_segments_of_any_size_and_alignment(case: Case, direction: str, seed: int) -> None:
    """Also from 1 byte, and with targets that are aligned otherwise than their sources."""
    move_random_segments(case, direction, seed)


def move_random_segments(case: Case, direction: str, seed: int) -> None:
    source, expected = noise(seed), torch.zeros(SIZE, dtype=torch.uint8)
    segments: list[Segment] = []
    make = case.inward if direction == "in" else case.outward
    for target, start, size in random_places(random.Random(seed)):
        segments.append(make(target, start, size))
        expected[target : target + size] = source[start : start + size]
    ends = (case.host, case.gpu) if direction == "in" else (case.gpu, case.host)
    ends[0].copy_(source)
    ends[1].zero_()
    torch.cuda.synchronize()
    case.move(segments)
    assert torch.equal(ends[1].cpu(), expected)


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("one_path_bytes", [0, SIZE])
@pytest.mark.parametrize("own", [RelayShape(1, 3, 1024), RelayShape(8)], ids=["1", "8"])
def test_small_segments_by_a_kernel_of_the_gpu_itself(
    direction: str, one_path_bytes: int, own: RelayShape
) -> None:
    settings = replace(
        ONLY_TASKS, one_path_bytes=one_path_bytes, kernel_in_bytes=SIZE, kernel_out_bytes=SIZE
    )
    for case in opened(1, settings, own):
        for seed in range(3):
            move_random_segments(case, direction, seed)


def test_both_ways_at_once_by_kernels() -> None:
    """The halves of the memories change places; what comes in, and what goes out, is right."""
    half, block = SIZE // 2, 16 << 10
    settings = replace(ONLY_TASKS, kernel_in_bytes=SIZE, kernel_out_bytes=SIZE)
    for case in opened(1, settings):
        case.gpu.copy_(noise(2))
        torch.cuda.synchronize()
        places = list(range(0, half, block))
        random.Random(1).shuffle(places)
        tickets = [
            case.engine.submit([case.inward(at, at, block) for at in places]),
            case.engine.submit([case.outward(half + at, half + at, block) for at in places]),
        ]
        assert all(case.engine.wait(ticket, 60) for ticket in tickets)
        assert torch.equal(case.host, torch.cat([noise()[:half], noise(2)[half:]]))
        assert torch.equal(case.gpu.cpu(), case.host)


def random_places(rng: random.Random) -> list[tuple[int, int, int]]:
    """(target, source, size) whose targets do not overlap, in no order."""
    count = rng.choice([1, 10, 300, 3000])
    cuts = sorted(rng.sample(range(SIZE), 2 * count))
    places: list[tuple[int, int, int]] = []
    for start, stop in list(pairwise(cuts))[::2]:
        size = min(stop - start, rng.choice([1, 2, 15, 16, 17, 4095, 4096, 4097, 65536, SIZE]))
        source = rng.randrange(SIZE - size + 1)
        if rng.random() < 0.5:  # addresses that are equal modulo 16, as in the product
            source = max(0, source - source % 16 + start % 16 - 16)
        places.append((start, source, size))
    rng.shuffle(places)
    return places


@needs_two
@pytest.mark.parametrize("apart", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 15, 31, 4095, 4096, 4111, 1_000_003])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_relay_kernel_alone(
    kernels_pair: Case, apart: int, size: int, shape: RelayShape
) -> None:
    """Every alignment of the kernel, and no byte besides."""
    pair = kernels_pair
    relay = RelayLaunch(1, shape)
    for offset in (0, 3, 16):
        pair.gpu.fill_(99)
        torch.cuda.synchronize()
        target = pair.gpu.data_ptr() + 64 + offset
        relay.copy([(target, pair.host.data_ptr() + 128 + offset + apart, size)])
        torch.cuda.synchronize(0)
        got = pair.gpu[: size + 256].cpu()
        start = 64 + offset
        assert (got[:start] == 99).all()
        assert (got[start + size :] == 99).all()
        source = 128 + offset + apart
        assert torch.equal(got[start : start + size], pair.host[source : source + size])


@needs_two
@pytest.mark.parametrize("shape", SHAPES)
def test_the_relay_kernel_alone_outwards(pair: Case, shape: RelayShape) -> None:
    """Pieces of all kinds in one launch: tiles are dealt over all of them."""
    relay = RelayLaunch(1, shape)
    pair.gpu.copy_(pair.host)
    pair.host.fill_(99)
    torch.cuda.synchronize()
    source_bytes, expected = noise(), torch.full_like(pair.host, 99)
    pieces: list[tuple[int, int, int]] = []
    for number in range(RELAY.pieces):
        start = number * 300_000 + number % 7
        source, size = start + (number % 3) * 16 + number % 2, 1 + 1733 * number
        pieces.append((pair.host.data_ptr() + start, pair.gpu.data_ptr() + source, size))
        expected[start : start + size] = source_bytes[source : source + size]
    relay.copy(pieces)
    assert torch.equal(pair.host, expected)


@needs_two
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_that_is_recalled_while_it_runs_ends_soon(pair: Case, shape: RelayShape) -> None:
    """And what it has in flight arrives before its end, or never."""
    relay = RelayLaunch(1, shape)
    whole = [(pair.gpu.data_ptr(), pair.host.data_ptr(), SIZE)] * RELAY.pieces
    began_s = time.monotonic()
    relay.copy(whole)
    undisturbed_s = time.monotonic() - began_s
    began_s = time.monotonic()
    relay.launch(whole)
    while relay.started != relay.number:
        assert time.monotonic() - began_s < 10
    relay.recall()
    torch.cuda.synchronize(1)
    assert time.monotonic() - began_s < undisturbed_s / 2
    pair.gpu.fill_(9)
    torch.cuda.synchronize(0)
    time.sleep(0.01)
    assert (pair.gpu == 9).all()


@needs_two
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_that_was_recalled_writes_nothing(pair: Case, shape: RelayShape) -> None:
    relay = RelayLaunch(1, shape)
    relay.copy([(pair.gpu.data_ptr(), pair.host.data_ptr(), SIZE)], recalled=True)
    torch.cuda.synchronize(0)
    assert not pair.gpu.any()
    assert relay.started == relay.number


@needs_two
def test_numbers_of_launches_come_round(pair: Case) -> None:
    """A recall of an old launch is none of a new one, however far apart their numbers are."""
    relay = RelayLaunch(1)
    for number in (1 << 31, (1 << 32) - 2):
        pair.gpu.zero_()
        torch.cuda.synchronize()
        relay.number = number
        relay.copy([(pair.gpu.data_ptr(), pair.host.data_ptr(), 4096)])
        torch.cuda.synchronize(0)
        assert torch.equal(pair.gpu[:4096].cpu(), pair.host[:4096])


@needs_two
def test_both_directions_at_once(pair: Case) -> None:
    back = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    there = noise(2).to("cuda:0")
    torch.cuda.synchronize()
    out = Segment(back.data_ptr(), there.data_ptr(), SIZE, HOST, 0)
    tickets = [pair.engine.submit([one]) for one in (pair.inward(), out)]
    assert all(pair.engine.wait(ticket, 60) for ticket in tickets)
    assert torch.equal(pair.gpu.cpu(), pair.host)
    assert torch.equal(back, noise(2))


@needs_two
def test_between_gpus(pair: Case) -> None:
    there = noise(3).to("cuda:1")
    torch.cuda.synchronize(1)
    pair.move([Segment(pair.gpu.data_ptr(), there.data_ptr(), SIZE, 0, 1)])
    assert torch.equal(pair.gpu.cpu(), noise(3))


def test_small_transfers_are_one_copy() -> None:
    for case in opened(1, Settings()):
        stream = torch.cuda.Stream(0)
        case.gpu.zero_()
        torch.cuda.synchronize()
        pieces = [case.inward(at, at, 1000) for at in range(0, 100_000, 1000)]
        assert case.engine.wait(case.engine.submit(pieces, stream), 60)
        assert torch.equal(case.gpu[:100_000].cpu(), case.host[:100_000])
        assert all(one.tasks == 0 for one in case.engine.counts().values())


# ---- stream order -------------------------------------------------------------------------------


def test_a_transfer_comes_after_what_the_stream_had(case: Case) -> None:
    stream = torch.cuda.Stream(0)
    case.host.zero_()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
        case.gpu.fill_(5)
    ticket = case.engine.submit([case.outward()], stream)
    assert case.engine.wait(ticket, 60)
    assert (case.host == 5).all()


def test_the_stream_goes_on_meanwhile(case: Case) -> None:
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
    ticket = case.engine.submit([case.inward()], stream)
    assert not case.engine.poll(ticket), "it waits for the stream"
    stream.synchronize()
    assert case.engine.wait(ticket, 60)
    assert torch.equal(case.gpu.cpu(), case.host)


def test_nothing_is_written_after_the_end(case: Case) -> None:
    for _ in range(10):
        case.gpu.zero_()
        torch.cuda.synchronize()
        case.move([case.inward()])
        seen = case.gpu.clone()
        case.gpu.fill_(100)
        torch.cuda.synchronize()
        assert torch.equal(seen.cpu(), case.host)
        assert (case.gpu == 100).all()


def test_a_stream_follows_a_transfer_that_was_cancelled(case: Case) -> None:
    """What it is given later is written after the last of the transfer's bytes."""
    stream = torch.cuda.Stream(0)
    for _ in range(10):
        ticket = case.engine.submit([case.inward()])
        case.engine.cancel(ticket)
        case.engine.follow(ticket, stream)
        with torch.cuda.stream(stream):
            case.gpu.fill_(100)
        assert case.engine.wait(ticket, 60)
        stream.synchronize()
        assert (case.gpu == 100).all()


def test_memory_that_is_not_pinned_is_refused(case: Case) -> None:
    plain = torch.empty(SIZE, dtype=torch.uint8)
    with pytest.raises(ValueError, match="is not pinned"):
        case.engine.submit([Segment(case.gpu.data_ptr(), plain.data_ptr(), SIZE, 0, HOST)])


# ---- ends ---------------------------------------------------------------------------------------


def test_cancelled_transfers_write_nothing_after_their_end(case: Case) -> None:
    for pause_s in (0.0, 1e-4, 5e-4):
        ticket = case.engine.submit([case.inward()])
        time.sleep(pause_s)
        case.engine.cancel(ticket)
        assert case.engine.wait(ticket, 60)
        case.gpu.fill_(9)
        time.sleep(0.05)
        torch.cuda.synchronize()
        assert (case.gpu == 9).all()
    assert case.engine.state(ticket) in ("cancelled", "done")


def test_a_transfer_is_cancelled_before_its_stream_comes_to_it(case: Case) -> None:
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
    ticket = case.engine.submit([case.inward()], stream)
    case.engine.cancel(ticket)
    assert case.engine.wait(ticket, 60)
    assert case.engine.state(ticket) == "cancelled"
    stream.synchronize()
    assert not case.gpu.any()


# ---- relays that fail ---------------------------------------------------------------------------


@needs_two
@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_stalled_relay_costs_only_time(pair: Case, direction: str) -> None:
    case = pair
    if direction == "out":
        case.gpu.copy_(case.host)
        case.host.zero_()
    target = case.gpu if direction == "in" else case.host
    torch.cuda.synchronize()
    with stalling(case.engine, 1) as stall:
        stall()
        case.move([case.inward() if direction == "in" else case.outward()])
        assert torch.equal(target.cpu(), noise())
        target.fill_(9)
        torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)  # what was launched meanwhile has run now
    assert (target == 9).all(), "a relay that was recalled wrote"
    assert case.engine.counts()[f"{direction}1"].resent > 0


@needs_two
def test_stalls_in_the_middle() -> None:
    """Relays begin, stall, are recalled, and come back."""
    for case in opened(2, replace(ONLY_TASKS, pause_s=1e-3)):
        for turn in range(10):
            case.gpu.zero_()
            torch.cuda.synchronize()
            with stalling(case.engine, 1) as stall:
                ticket = case.engine.submit([case.inward()])
                time.sleep(1e-4 * turn)
                stall()
                assert case.engine.wait(ticket, 60)
                assert torch.equal(case.gpu.cpu(), case.host)
        assert relayed_bytes(case) > 0


@needs_two
def test_two_engines_at_once(pair: Case) -> None:
    for other in opened(2):
        both = (pair, other)
        threads = [threading.Thread(target=one.move, args=([one.inward()],)) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(pair.gpu.cpu(), pair.host)
        assert torch.equal(other.gpu.cpu(), other.host)


def test_an_idle_engine_uses_no_processor(case: Case) -> None:
    case.move([case.inward()])
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.1
