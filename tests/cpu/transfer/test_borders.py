"""Copies are cut where registrations of host memory meet: CUDA refuses those that cross."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
from called_links import Piece, Task
from fake_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st
from simulated_links import Simulation

from c2cserve.kernels.gpu.host_borders import BORDER_BYTES, cut_at_borders
from c2cserve.transfer.engine import LinkError, TransferError
from c2cserve.transfer.gpus import open_on
from c2cserve.transfer.moves import HOST, Port, Segment, ports_of
from c2cserve.transfer.settings import Settings

TASK = 48
SETTINGS = Settings(
    task_bytes=TASK, task_bytes_most=4 * TASK, alone_bytes=4 * TASK, peer_bytes=8 * TASK, depth=2,
    one_path_bytes=0, stall_s=1e9,
)  # fmt: skip


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(1, 5000))
def test_parts_follow_each_other_and_none_has_a_border_within(
    address: int, size: int, border: int
) -> None:
    parts = list(cut_at_borders(address, size, border))
    assert [0, *(at + part for at, part in parts)] == [*(at for at, _ in parts), size]
    for at, part in parts:
        assert part > 0
        assert (address + at) // border == (address + at + part - 1) // border
    for _, (at, _) in pairwise(parts):
        assert (address + at) % border == 0, "cut at borders only"


def test_settings_need_a_distance_between_borders() -> None:
    with pytest.raises(ValueError, match="1 byte or more between two borders"):
        Settings(border_bytes=0)
    assert Settings().border_bytes == BORDER_BYTES


class Borders(Simulation):
    """Notes what crosses a border, and has small transfers, too."""

    crossed = 0

    def start(self, task: Task) -> None:
        self._look(task.pieces, task.port)
        super().start(task)

    def _look(self, pieces: Sequence[Piece], port: Port) -> None:
        border = self.settings.border_bytes
        for piece in pieces:
            at = piece.source if port.direction == "in" else piece.target
            crosses = at // border != (at + piece.size - 1) // border
            self.crossed += crosses and port.direction != "peer"


@st.composite
def extents(draw: st.DrawFn) -> list[Segment]:
    """Draw segments that write no byte twice: into GPUs, out of them, and between them."""
    ends = sorted(draw(st.sets(st.integers(0, 4000), min_size=2, max_size=9)))
    ways = [(0, HOST), (1, HOST), (HOST, 0), (1, 0)]
    found: list[Segment] = []
    for start, stop in pairwise(ends):
        target_gpu, source_gpu = draw(st.sampled_from(ways))
        source = draw(st.integers(0, 4096 - (stop - start)))
        found.append(Segment(start, source, stop - start, target_gpu, source_gpu))
    return found


@given(extents(), st.integers(1, 3000), st.sampled_from([1, 2]))
def test_every_byte_is_copied_once_and_no_micro_task_crosses(
    segments: list[Segment], border: int, depth: int
) -> None:
    links = Borders(2, replace(SETTINGS, border_bytes=border, depth=depth))
    links.submit(segments)
    links.run()
    assert not links.crossed
    expected = {gpu: [0] * links.memory_bytes for gpu in links.written}
    for one in segments:
        for at in range(one.target, one.target + one.size):
            expected[one.target_gpu][at] += 1
    assert links.written == expected


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(fake_cuda.build(tmp_path_factory.mktemp("cuda")))


SIZE, BORDER = 1 << 18, 1 << 13


@pytest.mark.parametrize("inward", [True, False])
@pytest.mark.parametrize("stop", [20_000, SIZE], ids=["one copy", "micro-tasks"])
@pytest.mark.parametrize("step", [30_000, 700], ids=["copies", "batches"])
def test_a_driver_that_refuses_copies_across_refuses_none(
    cuda: FakeCuda, inward: bool, stop: int, step: int
) -> None:
    settings = replace(
        SETTINGS, task_bytes=1 << 14, task_bytes_most=1 << 16, alone_bytes=1 << 16,
        batch_bytes=1000, border_bytes=BORDER, one_path_bytes=20_000,
    )  # fmt: skip
    host, near = (np.zeros(SIZE, np.uint8) for _ in range(2))
    source, target = (host, near) if inward else (near, host)
    source[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    ends = (0, HOST) if inward else (HOST, 0)
    # The gaps keep segments apart.
    segments = [
        Segment(target.ctypes.data + at, source.ctypes.data + at, min(step, stop - at) - 1, *ends)
        for at in range(0, stop, step)
    ]
    cuda.border(host.ctypes.data, host.ctypes.data + SIZE, BORDER)
    try:
        _move(cuda, settings, segments)
        with pytest.raises((LinkError, TransferError), match=r"\(1\)"):
            _move(cuda, replace(settings, border_bytes=1 << 40), segments)
    finally:
        cuda.border(0, 0, 0)
    copied = np.zeros(SIZE, bool)
    for one in segments:
        at = one.target - target.ctypes.data
        copied[at : at + one.size] = True
    assert np.array_equal(target, np.where(copied, source, 0))


def _move(cuda: FakeCuda, settings: Settings, segments: list[Segment]) -> None:
    ports, relays = ports_of([0], [])
    contexts = [port.carrier + 1 for port in ports]
    engine = open_on(ports, relays, contexts, b"code", settings, driver=str(Path(cuda.path)))
    try:
        ticket = engine.submit(segments)
        limit_s = time.monotonic() + 20
        while not engine.poll(ticket):
            assert time.monotonic() < limit_s
            cuda.pump()
            time.sleep(1e-4)
    finally:
        closing = threading.Thread(target=engine.close)
        closing.start()
        while closing.is_alive():
            cuda.pump()
            closing.join(1e-3)


def test_weights_that_gemms_copy_are_cut_at_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("c2cserve.kernels.gpu.driver")
    copies: list[tuple[int, int, int, int]] = []
    monkeypatch.setattr(driver, "copy_async", lambda *copy: copies.append(copy))
    source = 5 * BORDER_BYTES - 100
    driver.copy_from_host(7, source, BORDER_BYTES + 300, 9)
    assert copies == [
        (7, source, 100, 9),
        (107, 5 * BORDER_BYTES, BORDER_BYTES, 9),
        (107 + BORDER_BYTES, 6 * BORDER_BYTES, 200, 9),
    ]
