"""Where segments lie: on the nodes of those who read them, as the kernel is told."""

import ctypes
import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import layered, write_file

from c2cserve.memory import numa, segment
from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.segment import Segment


class Kernel:
    """Stands in for the C library: what `mbind` was asked for."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[int, int, int, int, int]] = []

    def syscall(self, number: Any, *given: Any) -> int:
        _, size, mode, mask, bits, flags = (one.value for one in given)
        words = ctypes.cast(mask, ctypes.POINTER(ctypes.c_uint64))
        joined = sum(words[word] << 64 * word for word in range((bits - 1) // 64))
        self.calls.append((size, mode, joined, bits, flags))
        ctypes.set_errno(self.error)
        return -1 if self.error else 0


def create(directory: Path, name: str, nodes: Sequence[int]) -> Segment:
    model = layered(2, (100,))
    write_file(directory / "model.safetensors", model.stored)
    sources = open_checkpoint(directory, model.plan)
    return Segment.create(directory / name, model.plan, sources, nodes)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(numa, "_libc", found)
    return found


@pytest.mark.parametrize(
    ("nodes", "mode", "mask", "bits"),
    [((1,), 1, 0b10, 65), ((0, 1), 3, 0b11, 65), ((0, 70), 3, 1 | 1 << 70, 129)],
)
def test_one_node_is_preferred_and_several_take_turns(
    kernel: Kernel, tmp_path: Path, nodes: Sequence[int], mode: int, mask: int, bits: int
) -> None:
    with (tmp_path / "file").open("wb+") as file:
        numa.place_file(file.fileno(), 1 << 16, nodes)
        assert os.fstat(file.fileno()).st_size == 1 << 16
    assert kernel.calls == [(1 << 16, mode, mask, bits, 0)]


def test_the_kernel_takes_the_call(tmp_path: Path) -> None:
    """Node 0 is everywhere. A container may forbid the call, which has its errors."""
    with (Path("/dev/shm") / f"c2cserve-test-{os.getpid()}").open("wb+") as file:
        Path(file.name).unlink()
        try:
            numa.place_file(file.fileno(), 1 << 16, (0,))
        except OSError as error:
            assert error.errno in (errno.EPERM, errno.ENOSYS)  # noqa: PT017 - either may happen


@pytest.mark.parametrize("error", [0, errno.EPERM])
def test_a_segment_is_placed_before_it_has_pages(
    kernel: Kernel, tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.error = error
    segment._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            made = create(tmp_path, f"s{number}", (0, 1))
            assert made.bytes == kernel.calls[number][0]
    assert caplog.text.count("segments lie on any NUMA node: mbind: ") == (1 if error else 0)


def test_without_nodes_nothing_is_asked_for(kernel: Kernel, tmp_path: Path) -> None:
    create(tmp_path, "s", ())
    assert kernel.calls == []
