"""The links of GPUs on an emulated driver: what is called, in which order, on which stream."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
from fake_cuda import FakeCuda

from c2cserve.kernels.gpu.aot.compiler import SOURCES
from c2cserve.kernels.gpu.aot.variants import RELAY
from c2cserve.transfer.engine import LinkError, Ticket, TransferEngine
from c2cserve.transfer.gpus import open_on
from c2cserve.transfer.library import library
from c2cserve.transfer.moves import HOST, Segment, ports_of
from c2cserve.transfer.settings import STAGES_LEAST, STAGES_MOST, RelayShape, Settings

SIZE = 1 << 20
SETTINGS = Settings(
    task_bytes=1 << 14, task_bytes_most=1 << 16, alone_bytes=1 << 16, depth=2,
    one_path_bytes=1 << 10, stall_s=100.0, pause_s=100.0,
)  # fmt: skip
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass
class Case:
    cuda: FakeCuda
    engine: TransferEngine
    source: Bytes
    target: Bytes

    def segment(self, start: int = 0, stop: int = SIZE, *, inward: bool = True) -> Segment:
        ends = (0, HOST) if inward else (HOST, 0)
        target, source = self.target.ctypes.data, self.source.ctypes.data
        return Segment(target + start, source + start, stop - start, *ends)

    def until(self, condition: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < limit_s
            self.cuda.pump()
            time.sleep(1e-4)

    def finish(self, ticket: Ticket) -> None:
        self.until(lambda: self.engine.poll(ticket))

    def relay_streams(self) -> list[int]:
        engine, ports = self.engine._native(), range(len(self.engine._ports))
        found = [
            library().c2c_transfers_relay_stream(engine, link, lane)
            for link in ports
            for lane in range(2)
        ]
        return [one for one in found if one is not None]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(fake_cuda.build(tmp_path_factory.mktemp("cuda")))


def opened(
    cuda: FakeCuda, path: Path | None = None, settings: Settings = SETTINGS,
    relay: RelayShape | None = None, own: RelayShape | None = None, gpus: int = 2,
) -> TransferEngine:  # fmt: skip
    ports, relays = ports_of(range(gpus), permutations(range(gpus), 2))
    contexts = [port.carrier + 1 for port in ports]
    driver = str(path or cuda.path)
    return open_on(ports, relays, contexts, b"code", settings, relay, own, driver=driver)


@pytest.fixture
def case(cuda: FakeCuda) -> Iterator[Case]:
    yield from closed_after(cuda, SETTINGS)


@pytest.fixture
def impatient(cuda: FakeCuda) -> Iterator[Case]:
    """It takes relays for stalled that are a little late."""
    yield from closed_after(cuda, replace(SETTINGS, stall_s=0.02))


def closed_after(
    cuda: FakeCuda, settings: Settings, relay: RelayShape | None = None,
    own: RelayShape | None = None, gpus: int = 2,
) -> Iterator[Case]:  # fmt: skip
    before = cuda.left
    engine = opened(cuda, settings=settings, relay=relay, own=own, gpus=gpus)
    source = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    yield Case(cuda, engine, source, np.zeros(SIZE, dtype=np.uint8))
    cuda.unpin(0, 0)
    cuda.pump()
    closing = threading.Thread(target=engine.close)
    closing.start()
    while closing.is_alive():
        cuda.pump()
        closing.join(1e-3)
    assert cuda.left == before, "contexts were popped, all else was freed"


@pytest.mark.parametrize("inward", [True, False])
def test_both_paths_carry_bytes(case: Case, inward: bool) -> None:
    launches, copies = case.cuda.launches, case.cuda.copies
    case.finish(case.engine.submit([case.segment(inward=inward)]))
    assert np.array_equal(case.target, case.source)
    counts = case.engine.counts()
    own, neighbour = ("in0", "in1") if inward else ("out0", "out1")
    assert counts[own].direct_bytes + counts[neighbour].relayed_bytes == SIZE
    assert case.cuda.copies - copies == counts[own].tasks > 0
    assert case.cuda.launches - launches == counts[neighbour].tasks > 0


def test_segments_are_grouped(case: Case) -> None:
    copies, batches, launches = case.cuda.copies, case.cuda.batches, case.cuda.launches
    case.finish(case.engine.submit([case.segment(at, at + 100) for at in range(0, SIZE, 200)]))
    expected = np.where(np.arange(SIZE) % 200 < 100, case.source, 0)
    assert np.array_equal(case.target, expected)
    assert case.cuda.copies == copies
    assert case.cuda.batches > batches
    assert case.cuda.launches > launches


@pytest.mark.parametrize("inward", [True, False])
@pytest.mark.parametrize("limit", [64, 4096])
def test_small_segments_are_a_kernels_on_the_gpu_itself(
    cuda: FakeCuda, inward: bool, limit: int
) -> None:
    """In the direction that it was chosen for, if segments are shorter than that on average."""
    chosen = replace(
        SETTINGS, kernel_in_bytes=limit * inward, kernel_out_bytes=limit * (not inward)
    )
    for case in closed_after(cuda, chosen, RelayShape(2, 3), own=RelayShape(4, 12), gpus=1):
        for way in (True, False):
            before = cuda.copies, cuda.batches, cuda.launches
            case.target[:] = 0
            small = [case.segment(at, at + 100, inward=way) for at in range(0, SIZE, 200)]
            case.finish(case.engine.submit(small))
            assert np.array_equal(
                case.target, np.where(np.arange(SIZE) % 200 < 100, case.source, 0)
            )
            done = np.subtract((cuda.copies, cuda.batches, cuda.launches), before)
            assert done[0] == 0
            if way == inward and limit > 100:
                assert done[1] == 0
                assert done[2] >= len(small) / RELAY.pieces
            else:
                assert done[1] > 0
                assert done[2] == 0
        launches = cuda.launches
        case.finish(case.engine.submit([case.segment(inward=inward)]))
        assert np.array_equal(case.target, case.source)
        assert cuda.launches == launches, "large segments are the copy engine's"


def test_a_small_transfer_of_small_segments_is_a_launch_in_stream_order(cuda: FakeCuda) -> None:
    for case in closed_after(cuda, replace(SETTINGS, kernel_in_bytes=4096), gpus=1):
        stream, written = cuda.stream(0), np.full(SIZE, 7, dtype=np.uint8)
        cuda.block(stream.cuda_stream)
        cuda.copy(case.source.ctypes.data, written.ctypes.data, SIZE, stream)
        copies, launches = cuda.copies, cuda.launches
        ticket = case.engine.submit([case.segment(0, 100), case.segment(300, 500)], stream)
        cuda.pump()
        assert not case.engine.poll(ticket)
        assert not case.target.any()
        cuda.block(stream.cuda_stream, blocked=False)
        case.finish(ticket)
        assert (cuda.copies, cuda.launches) == (copies, launches + 1)
        assert case.engine.counts()["in0"].direct_bytes == case.target.astype(bool).sum() == 300
        cuda.pump()
        cuda.destroy(stream)


def test_the_kernel_has_the_parameters_that_are_launched() -> None:
    assert RELAY.pieces == 160, "kRelayPieces of cuda_links.h"
    assert 40 + 24 * RELAY.pieces <= 4096, "kernel parameters"
    source = (SOURCES / f"{RELAY.source}.cu").read_text()
    assert f"kStagesMost = {STAGES_MOST};" in source
    assert f"kReading = {STAGES_LEAST - 1};" in source


@pytest.mark.parametrize("shape", [RelayShape(), RelayShape(2, 3)])
def test_shapes_of_relays_are_launched_as_they_are(cuda: FakeCuda, shape: RelayShape) -> None:
    """The driver allows the ring's shared memory on every GPU that relays."""
    for case in closed_after(cuda, SETTINGS, shape):
        launches = cuda.launches
        case.finish(case.engine.submit([case.segment()]))
        assert np.array_equal(case.target, case.source)
        assert cuda.launches > launches
        assert case.engine.counts()["in1"].errors == 0


@pytest.mark.parametrize(
    ("ctas", "stages", "stage_bytes", "said"),
    [
        (0, 8, 16384, "1 CTA or more"),
        (4, 2, 16384, "3 to 16 stages"),
        (4, 17, 4096, "3 to 16 stages"),
        (4, 8, 100, "multiple of 128"),
        (4, 15, 16384, "do not fit"),
    ],
)
def test_shapes_that_no_kernel_has(ctas: int, stages: int, stage_bytes: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RelayShape(ctas, stages, stage_bytes)


@pytest.mark.parametrize("stop", [1000, SIZE], ids=["one copy", "micro-tasks"])
def test_a_transfer_comes_after_what_its_stream_had(case: Case, stop: int) -> None:
    stream, written = case.cuda.stream(0), np.full(SIZE, 7, dtype=np.uint8)
    case.cuda.block(stream.cuda_stream)
    case.cuda.copy(case.source.ctypes.data, written.ctypes.data, SIZE, stream)
    ticket = case.engine.submit([case.segment(0, stop)], stream)
    for _ in range(20):
        case.cuda.pump()
        time.sleep(1e-3)
    assert not case.engine.poll(ticket)
    assert not case.target.any()
    case.cuda.block(stream.cuda_stream, blocked=False)
    case.finish(ticket)
    assert (case.target[:stop] == 7).all()
    case.cuda.pump()
    case.cuda.destroy(stream)


def test_a_stream_follows_what_is_under_way_of_a_cancelled_transfer(case: Case) -> None:
    """What it is given later sees no more writes."""
    ticket = case.engine.submit([case.segment()])
    stream, seen = case.cuda.stream(0), np.zeros(SIZE, dtype=np.uint8)
    with pytest.raises(ValueError, match="has not begun"):
        case.engine.follow(ticket, stream)
    case.engine.cancel(ticket)
    case.engine.follow(ticket, stream)
    case.cuda.copy(seen.ctypes.data, case.target.ctypes.data, SIZE, stream)
    case.finish(ticket)
    case.cuda.pump()
    assert case.target.any()
    assert np.array_equal(seen, case.target)
    case.cuda.destroy(stream)


def test_stalled_relays_are_recalled_and_write_nothing(impatient: Case) -> None:
    case = impatient
    for stream in case.relay_streams():
        case.cuda.block(stream)
    ticket = case.engine.submit([case.segment()])
    case.finish(ticket)
    assert np.array_equal(case.target, case.source)
    assert case.engine.counts()["in1"].resent == 2
    case.target[:] = 9
    for stream in case.relay_streams():
        case.cuda.block(stream, blocked=False)
    case.cuda.pump()
    assert (case.target == 9).all()


@pytest.mark.parametrize("inward", [True, False])
def test_host_memory_that_is_not_pinned_is_refused(case: Case, inward: bool) -> None:
    host = np.zeros(SIZE, dtype=np.uint8)
    case.cuda.unpin(host.ctypes.data, host.ctypes.data + SIZE)
    ends = (case.target.ctypes.data, host.ctypes.data)
    segment = Segment(*ends, SIZE, 0, HOST) if inward else Segment(*ends[::-1], SIZE, HOST, 0)
    with pytest.raises(ValueError, match="is not pinned"):
        case.engine.submit([segment])
    with pytest.raises(ValueError, match="is not pinned"):
        case.engine.submit([segment._replace(size=100)])
    assert not case.target.any()


def test_a_launch_that_fails_is_sent_again(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    for stream in case.relay_streams():
        case.cuda.fail(stream)
    case.finish(case.engine.submit([case.segment()]))
    assert np.array_equal(case.target, case.source)
    assert case.engine.counts()["in1"].errors == 1
    assert "in1 relays no more: cuLaunchKernel(relay): CUDA_ERROR_OF_A_TEST (719)" in caplog.text


def test_the_stream_of_a_gpu_without_links_is_refused(case: Case) -> None:
    stream = case.cuda.stream(5)
    with pytest.raises(LinkError, match="no link of GPU 5"):
        case.engine.submit([case.segment()], stream)
    case.cuda.destroy(stream)


def test_a_broken_stream_is_refused(case: Case) -> None:
    stream = case.cuda.stream(1)
    case.cuda.fail(stream.cuda_stream)
    with pytest.raises(LinkError, match=r"cuEventRecord: CUDA_ERROR_OF_A_TEST \(719\)"):
        case.engine.submit([case.segment()], stream)
    case.cuda.destroy(stream)


def test_no_driver_is_one_clear_error(cuda: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"none\.so"):
        opened(cuda, tmp_path / "none.so")
