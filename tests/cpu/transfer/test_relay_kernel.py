"""The relay kernel's source, compiled for the processor: which bytes it copies, and in which order.

Not what hardware adds: several threads at a time, and what memory accesses of them may see.
"""

import ctypes
import random
import re
import subprocess
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from c2cserve.kernels.gpu.aot.compiler import SOURCES
from c2cserve.transfer.settings import RelayShape

HEADER = Path(__file__).parent / "relay_host.h"
PIECES, THREADS, NUMBER = 16, 96, 7
SIZE = 1 << 17
SHAPES = [
    RelayShape(1, 3, 128, 512), RelayShape(2, 4, 1024, 1), RelayShape(3, 16, 512, 3000),
]  # fmt: skip
# Every assembler statement of the source, in its order, and what it does.
STATEMENTS = (
    "number = look(p.number);\n",
    "*p.started = p.number;\n",
    ";\n",
)
MAIN = """
extern "C" int64_t run(const RelayParams* p, uint32_t ctas, int late_loads, int late_stores,
                       int64_t looks) {
  loads_late = late_loads, stores_late = late_stores, looks_left = looks, faults = 0;
  gridDim.x = ctas;
  for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x) {
    stopped = false;
    for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) relay(*p);
    ptx::end_cta();
  }
  return faults;
}
"""


class Piece(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("target", "source", "size"))


class Params(ctypes.Structure):
    _fields_ = (
        ("recalled", ctypes.c_void_p), ("started", ctypes.c_void_p), ("number", ctypes.c_uint32),
        ("pieces", ctypes.c_uint32), ("stages", ctypes.c_uint32), ("stage_bytes", ctypes.c_uint32),
        ("recall_poll_bytes", ctypes.c_uint32), ("piece", Piece * PIECES),
    )  # fmt: skip


@dataclass
class Kernel:
    library: ctypes.CDLL

    def __post_init__(self) -> None:
        self.library.run.restype = ctypes.c_int64
        self.library.run.argtypes = (ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_int64)
        self.source = aligned()
        self.source[:] = np.random.default_rng(1).integers(1, 256, SIZE, dtype=np.uint8)
        self.target = aligned()

    def run(
        self, shape: RelayShape, pieces: list[tuple[int, int, int]], *,
        late: tuple[bool, bool] = (True, True), looks: int = -1, flags: bool = True,
    ) -> int:  # fmt: skip
        """Copy pieces of offsets (target, source) and sizes. Return the mark of the start."""
        self.target[:] = 0
        started = ctypes.c_uint32(0)
        ends = self.target.ctypes.data, self.source.ctypes.data
        made = [Piece(ends[0] + to, ends[1] + source, size) for to, source, size in pieces]
        params = Params(
            None, ctypes.addressof(started) if flags else None, NUMBER, len(pieces), shape.stages,
            shape.stage_bytes, shape.recall_poll_bytes, (Piece * PIECES)(*made),
        )  # fmt: skip
        assert self.library.run(ctypes.addressof(params), shape.ctas, *late, looks) == 0
        return started.value


def aligned() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    memory = np.zeros(SIZE + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + SIZE]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("relay")
    replaced = iter(STATEMENTS)
    text = (SOURCES / "relay.cu").read_text().replace('#include "ptx.cuh"', "")
    text = text.replace("extern __shared__", "extern")
    text = re.sub(r"asm volatile\(.*?\);\n", lambda _: next(replaced), text, flags=re.DOTALL)
    assert next(replaced, None) is None, "the source has fewer statements"
    (folder / "relay.cpp").write_text(f'#include "{HEADER}"\n{text}{MAIN}')
    library = folder / "relay.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-DPIECES={PIECES}",
         f"-DTHREADS={THREADS}", str(folder / "relay.cpp"), "-o", str(library)],
        check=True, timeout=100,
    )  # fmt: skip
    return Kernel(ctypes.CDLL(str(library)))


def pieces_of(rng: random.Random) -> list[tuple[int, int, int]]:
    """Of all sizes and alignments; targets do not overlap."""
    room = SIZE // PIECES
    found: list[tuple[int, int, int]] = []
    for number in range(rng.choice([1, 3, PIECES])):
        target = number * room + rng.choice([0, 0, 1, 8, 15, 16])
        most = room - 16
        size = rng.choice([1, 15, 16, 17, 31, 128, 1000, 4096, 4111, most, rng.randrange(1, most)])
        apart = rng.choice([0, 0, 0, 1, 2, 4, 8])
        source = rng.randrange((SIZE - size) // 16 - 1) * 16 + target % 16 + apart
        found.append((target, min(source, SIZE - size), size))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_bytes_are_copied_and_no_other(kernel: Kernel, shape: RelayShape) -> None:
    rng = random.Random(1)
    for turn, late in product(range(25), product([False, True], repeat=2)):
        pieces = pieces_of(rng)
        assert kernel.run(shape, pieces, late=late) == NUMBER
        expected = np.zeros_like(kernel.target)
        for target, source, size in pieces:
            expected[target : target + size] = kernel.source[source : source + size]
        assert np.array_equal(kernel.target, expected), (turn, late, pieces)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_launch_without_flags_never_looks_for_a_recall(kernel: Kernel, shape: RelayShape) -> None:
    assert kernel.run(shape, [(0, 0, SIZE)], looks=0, flags=False) == 0
    assert np.array_equal(kernel.target, kernel.source)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_launch_that_was_recalled_before_writes_nothing(
    kernel: Kernel, shape: RelayShape
) -> None:
    assert kernel.run(shape, [(0, 0, SIZE)], looks=0) == NUMBER, "marked before the look"
    assert not kernel.target.any()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_recall_on_the_way_ends_a_launch(kernel: Kernel, shape: RelayShape, late: bool) -> None:
    """With nothing in flight (which `run` asserts), a part of the bytes, and those right."""
    kernel.run(shape, [(0, 0, SIZE)], late=(late, late), looks=shape.ctas + 1)
    written = kernel.target != 0
    assert 0 < written.sum() < SIZE
    assert np.array_equal(kernel.target[written], kernel.source[written])
