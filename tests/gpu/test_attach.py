"""Segments that are registered in pieces: streams go on meanwhile, and bytes are right across
borders, by copy engines and kernels."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from attach_stalls import LAYER_BYTES, beside, big_segment, measure, small_kernel

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.kernels.gpu.elementwise import embed
from c2cserve.kernels.gpu.gemm.launchers.direct import direct
from c2cserve.kernels.gpu.gemm.launchers.staged import bring, prefetch, ring
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.kernels.gpu.host_borders import BORDER_BYTES
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.memory.gradual_pinning import Pinner
from c2cserve.memory.segment import Segment as PoolSegment
from c2cserve.memory.segment import remove_segment
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.gpus import open_engine
from c2cserve.transfer.moves import HOST, Segment

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
GB = 10**9
WORST_MS = 20.0
MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    path = Path("/dev/shm") / f"c2cserve-test-{tmp_path.name}"
    yield path
    remove_segment(path)


@pytest.mark.parametrize(
    ("size", "written"), [(4 * GB, True), (GB, False)], ids=["loaded", "being loaded"]
)
def test_small_kernels_go_on_beside_an_attach_and_a_detach(
    place: Path, size: int, written: bool
) -> None:
    found = measure(place, size, small_kernel(0), written=written, device=0)
    for name, one in found.items():
        sys.stdout.write(f"\n{name}: worst {one.worst_ms:.2f} ms, {one.took_s:.3f} s in all\n")
    assert found["pieces"].worst_ms < WORST_MS
    assert found["back"].worst_ms < WORST_MS


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    made = open_engine([0])
    yield made
    made.close()
    torch.cuda.synchronize()


def test_every_byte_of_a_segment_arrives_while_it_is_attached(
    place: Path, engine: TransferEngine
) -> None:
    """Each layer is copied as soon as it is readable, as a whole, in small segments, and as one
    short copy across a border."""
    written = big_segment(place, 6 * LAYER_BYTES)
    segments = PinnedSegments(Pinner(device=0))
    pinned = segments.begin(place)
    base = pinned.segment.data.ctypes.data
    for number, (name, spot) in enumerate(pinned.segment.tensors.items()):
        pinned.want()
        while not pinned.readable(number):
            torch.zeros(1, device=DEVICE)
        target = torch.zeros(LAYER_BYTES, dtype=torch.uint8, device=DEVICE)
        sizes = [LAYER_BYTES, 65_000, 7 * MIB]
        part = sizes[number % len(sizes)]
        ends = (0, HOST)
        first, source = target.data_ptr(), base + spot.offset
        pieces = [
            Segment(first + at, source + at, min(part, LAYER_BYTES - at), *ends)
            for at in range(0, LAYER_BYTES, part)
        ]
        assert engine.wait(engine.submit(pieces), 60)
        assert np.array_equal(target.cpu().numpy(), written.raw(name))
        target.zero_()
        torch.cuda.synchronize()
        border = -source % BORDER_BYTES
        if MIB <= border <= LAYER_BYTES - MIB:
            across = Segment(first, source + border - MIB, 2 * MIB, *ends)
            assert engine.wait(engine.submit([across]), 60)
            expected = written.raw(name)[border - MIB : border + MIB]
            assert np.array_equal(target[: 2 * MIB].cpu().numpy(), expected)
    segments.close_all()


@dataclass
class Across:
    """Writable memory that is registered in pieces."""

    memory: Tensor
    border: int
    """Where two pieces meet."""


@pytest.fixture
def across() -> Iterator[Across]:
    memory = torch.zeros(3 * BORDER_BYTES, dtype=torch.uint8)
    pinner = Pinner(device=0)
    region = pinner.open(memory.data_ptr(), memory.numel(), lambda address, size: None)
    region.wait()
    yield Across(memory, BORDER_BYTES - memory.data_ptr() % BORDER_BYTES)
    torch.cuda.synchronize()
    pinner.close(region)
    pinner.finish()


def test_bytes_come_back_across_a_border(across: Across, engine: TransferEngine) -> None:
    size = 40 * MIB
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    for part in (size, 6 * MIB, 50_000):
        across.memory.zero_()
        first = across.border - size // 2
        pieces = [
            Segment(across.memory.data_ptr() + first + at, source.data_ptr() + at,
                    min(part, size - at), HOST, 0)
            for at in range(0, size, part)
        ]  # fmt: skip
        assert engine.wait(engine.submit(pieces), 60)
        assert torch.equal(across.memory[first : first + size], source.cpu())
        assert not across.memory[:first].any()
        assert not across.memory[first + size :].any()


Gemm = Callable[..., None]


@pytest.mark.parametrize(
    ("gemm", "tiles", "named"),
    [
        (direct, Tiles(bx=256, cluster=2), {}),
        (prefetch, Tiles(panel_rows=512), {}),
        (ring, Tiles(bx=128, slots=2), {}),
        (ring, Tiles(bx=128, slots=2), {"engines": True}),
    ],
    ids=["direct", "prefetch", "ring", "ring by engines"],
)
def test_gemms_read_weights_across_a_border(
    context: LaunchContext, across: Across, gemm: Gemm, tiles: Tiles, named: dict[str, bool]
) -> None:
    n, k = 4096, 2048
    handle, weight = weight_across(across, n, k)
    x = torch.randn(64, k, device=DEVICE).to(torch.bfloat16)
    out = torch.full((64, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    gemm(context, x, handle, None, out, tiles, **named)
    torch.cuda.synchronize()
    expected = x.float() @ weight.to(DEVICE).float().t()
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def weight_across(across: Across, n: int, k: int) -> tuple[WeightHandle, Tensor]:
    """Put a random weight in the middle of which two pieces meet. Return it, and a copy of it."""
    size = 2 * n * k
    there = across.memory[across.border - size // 2 :][:size].view(torch.bfloat16).view(n, k)
    weight = (torch.randn(n, k) / k**0.5).to(torch.bfloat16)
    there.copy_(weight)
    return WeightHandle(there.data_ptr(), (n, k), "bfloat16", "host", there), weight


def test_weights_across_a_border_are_brought_into_hbm(
    context: LaunchContext, across: Across
) -> None:
    handle, weight = weight_across(across, 4096, 2048)
    there = torch.zeros(4096, 2048, dtype=torch.bfloat16, device=DEVICE)
    bring(context, handle, there)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), weight)


def test_a_row_of_the_table_across_a_border_is_read(across: Across) -> None:
    hidden = 4096
    rows = 64
    first = across.border - rows * hidden - hidden  # bytes: the middle of a row is at the border
    table = across.memory[first:][: 2 * rows * hidden].view(torch.bfloat16).view(rows, hidden)
    values = torch.randn(rows, hidden).to(torch.bfloat16)
    table.copy_(values)
    ids = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    assert torch.equal(embed(table, ids, DEVICE).cpu(), values)


def test_an_attach_that_is_ended_midway_leaves_the_memory_free_for_another(place: Path) -> None:
    big_segment(place, GB, written=False)
    segments = PinnedSegments(Pinner(device=0))
    segments.begin(place)
    segments.close(place)
    whole: list[PoolSegment] = []
    stall = beside(small_kernel(0), lambda: whole.append(segments.open(place)))
    assert whole
    assert stall.worst_ms < WORST_MS
    segments.close_all()
