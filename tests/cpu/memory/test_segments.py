"""How weights lie in a segment, and that every process sees the same memory."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from checkpoints import Model, layered, layered_plan, write_file, write_zeros
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.layout import LayoutPlan, TensorPlan
from c2cserve.memory.loader import Loader
from c2cserve.memory.segment import (
    Segment,
    State,
    control_path,
    place_tensors,
    remove_segment,
    segment_bytes,
)

MIB = 1 << 20


def create(directory: Path, model: Model) -> Segment:
    write_file(directory / "model.safetensors", model.stored)
    return Segment.create(directory / "segment", model.plan, open_checkpoint(directory, model.plan))


def loaded(directory: Path, model: Model) -> Segment:
    segment = create(directory, model)
    Loader(segment, model.plan, open_checkpoint(directory, model.plan)).run()
    return segment


# ---- placement ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=30))
def test_tensors_are_aligned_in_order_and_apart(tensors: list[tuple[int, bool]]) -> None:
    plan = LayoutPlan(
        tuple(TensorPlan(f"t{i}", (n,), "bfloat16", at) for i, (n, at) in enumerate(tensors)), ()
    )
    places, size = place_tensors(plan, 4096)
    end = 4096
    for tensor in plan.tensors:
        place = places[tensor.name]
        assert place.offset % 64 == 0
        assert place.offset >= end
        end = place.offset + tensor.bytes
    assert end <= size
    assert size % 4096 == 0


def test_a_large_models_layers_begin_at_huge_pages() -> None:
    places, _ = place_tensors(layered_plan(3, (40 * MIB,)), 4096)
    assert all(place.offset % (2 * MIB) == 0 for place in places.values())


def test_a_hundred_tiny_models_do_not_waste_memory() -> None:
    """About two megabytes each, as the built-in specialists: a tenth for padding and manifest."""
    model = layered(8, (64, 1000))
    assert segment_bytes(model.plan) <= 1.1 * model.plan.bytes


# ---- files --------------------------------------------------------------------------------------


def test_a_segment_takes_its_memory_when_it_is_created(pool_dir: Path) -> None:
    model = layered(4, (512, 512))
    segment = create(pool_dir, model)
    assert segment.bytes == segment_bytes(model.plan)
    assert segment.path.stat().st_blocks * 512 >= segment.bytes


def test_a_full_filesystem_is_an_error_and_leaves_nothing(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        create(pool_dir, layered(1, (8,)))
    assert [path.name for path in pool_dir.iterdir()] == ["model.safetensors"]


def test_what_is_not_a_segment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(bytes(8192))
    (tmp_path / "s.ctl").write_bytes(bytes(64))
    with pytest.raises(ValueError, match="not a c2cserve segment"):
        Segment.open(tmp_path / "s")
    with pytest.raises(FileNotFoundError):
        Segment.open(tmp_path / "nothing")


def test_a_worker_can_not_write_weights(pool_dir: Path) -> None:
    worker = Segment.open(loaded(pool_dir, layered(1, (64,))).path)
    view = worker.raw("layers.0")
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_mappings_outlive_the_file(pool_dir: Path) -> None:
    model = layered(3, (100, 10))
    path = loaded(pool_dir, model).path
    worker = Segment.open(path)
    remove_segment(path)
    assert not path.exists()
    assert not control_path(path).exists()
    remove_segment(path)  # again is fine
    for i in range(3):
        assert worker.raw(f"layers.{i}").tobytes() == model.expected(f"layers.{i}")
    assert worker.state is State.READY


def test_populate_maps_the_pages_that_it_is_given(pool_dir: Path) -> None:
    worker = Segment.open(loaded(pool_dir, layered(4, (1024, 1024))).path)
    assert resident_bytes(worker.path) < worker.bytes
    before, half = resident_bytes(worker.path), worker.bytes // 2 // 4096 * 4096
    worker.populate(0, half)
    assert before < resident_bytes(worker.path) < worker.bytes
    worker.populate(half, worker.bytes)
    assert resident_bytes(worker.path) == worker.bytes


def resident_bytes(path: Path, pid: int | str = "self", field: str = "Rss") -> int:
    """Bytes of a file that a process has mapped read-only and touched (`field`: Rss or Pss)."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            ours = line.endswith(str(path)) and head[1].startswith("r--")
        elif ours and head[0] == f"{field}:":
            total += int(head[1]) * 1024
    return total


# ---- other processes ----------------------------------------------------------------------------

WORKER = """
import sys
from pathlib import Path
from c2cserve.memory.segment import Segment
segment = Segment.open(Path(sys.argv[1]))
for line in sys.stdin:
    match line.split():
        case ["touch"]:
            print(sum(int(segment.raw(name)[::64].sum()) for name in segment.tensors), flush=True)
        case ["want", group]:
            segment.want(int(group))
            print("ok", flush=True)
        case ["look"]:
            ready = "".join(str(int(segment.ready(g))) for g in range(len(segment.groups)))
            print(ready, segment.state.name, segment.loaded_bytes, flush=True)
"""


class Worker:
    """A process of its own that maps a segment and does what it is told."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def workers(path: Path, count: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        team = [Worker(path) for _ in range(count)]
        for worker in team:
            stack.enter_context(worker.process)
            stack.callback(worker.process.kill)
        yield team


def test_readiness_is_seen_by_other_processes(pool_dir: Path) -> None:
    segment = create(pool_dir, layered(3, (16,)))
    with workers(segment.path, 2) as (first, second):
        assert first.ask("look") == "000 LOADING 0"
        segment.set_ready(1)
        segment.add_loaded(64)
        assert [w.ask("look") for w in (first, second)] == ["010 LOADING 64"] * 2
        assert second.ask("want 2") == "ok"
        assert [segment.wanted(g) for g in range(3)] == [False, False, True]
        segment.state = State.FAILED
        assert first.ask("look") == "010 FAILED 64"


def test_more_workers_take_no_more_memory(pool_dir: Path) -> None:
    """The machine's proportional memory for a model's weights, with two workers and with four."""
    plan = layered_plan(4, (64 * MIB // 4,))
    write_zeros(pool_dir / "model.safetensors", plan)
    sources = open_checkpoint(pool_dir, plan)
    segment = Segment.create(pool_dir / "segment", plan, sources)
    Loader(segment, plan, sources).run()
    path = segment.path
    del segment  # the owner's own mapping would take its share
    proportional: dict[int, int] = {}
    for count in (2, 4):
        with workers(path, count) as team:
            assert len({worker.ask("touch") for worker in team}) == 1
            proportional[count] = sum(
                resident_bytes(path, worker.process.pid, "Pss") for worker in team
            )
    assert proportional[2] >= 256 * MIB
    assert proportional[4] < 1.05 * proportional[2]
    assert proportional[4] < 1.05 * path.stat().st_size
