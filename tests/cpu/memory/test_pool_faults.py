"""Each test here fails on the code as it is and passes with the patch named in its docstring."""

import errno
import fcntl
import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoints import layered, layered_plan, raw_file, write_file, write_zeros
from readers import eventually

from c2cserve.kernels.native import KernelsMissing
from c2cserve.memory import loader as loader_module
from c2cserve.memory.checkpoint import CheckpointError, find_files, open_checkpoint, read_header
from c2cserve.memory.layout import GroupPlan, LayoutPlan, Part, PlanError, TensorPlan
from c2cserve.memory.loader import Loader
from c2cserve.memory.pool import Listener, Pool
from c2cserve.memory.segment import Segment, State, segment_bytes
from c2cserve.processes.instances import remove_dead_runs

QUIET = Listener(lambda m: None, lambda m, s, t: None, lambda m, r: None)


def failures(reasons: list[str]) -> Listener:
    return Listener(lambda m: None, lambda m, s, t: None, lambda m, r: reasons.append(r))


def test_an_error_on_one_thread_is_not_taken_for_a_cancel(tmp_path: Path, pool_dir: Path) -> None:
    """pool-1: the error of one loader thread stops the others, whose LoadCancelled hid it: the
    model stayed LOADING for ever, its memory taken, nobody told."""
    model = layered(8, (64, 8))
    write_file(tmp_path / "model.safetensors", model.stored)
    failed = threading.Event()

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        if threading.current_thread().name.endswith("_0"):
            assert failed.wait(10)
            time.sleep(0.1)
            return os.preadv(fd, [buffer[:1]], offset)
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    reasons: list[str] = []
    pool = Pool("me", pool_dir, 1 << 30, failures(reasons), threads=2, read=read)
    pool.load("a", model.plan, open_checkpoint(tmp_path, model.plan))
    try:
        eventually(lambda: bool(reasons), 3)
        assert "Input/output error" in reasons[0]
        assert pool.used_bytes == 0
    finally:
        pool.close()


def test_missing_kernels_fail_the_model(
    tmp_path: Path, pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pool-1: an error that is not foreseen is reported too, and frees the model's memory."""

    def missing(*_: object) -> None:
        raise KernelsMissing("the CPU kernels are not built")

    monkeypatch.setattr(loader_module, "convert", missing)
    model = layered(2, (8,), dtype="float32", stored="bfloat16")
    write_file(tmp_path / "model.safetensors", model.stored)
    reasons: list[str] = []
    pool = Pool("me", pool_dir, 1 << 30, failures(reasons), threads=1)
    pool.load("a", model.plan, open_checkpoint(tmp_path, model.plan))
    try:
        eventually(lambda: bool(reasons), 3)
        assert "not built" in reasons[0]
        assert pool.used_bytes == 0
    finally:
        pool.close()


def test_the_pool_answers_while_memory_is_allocated(
    tmp_path: Path, pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pool-1: allocating a large segment takes seconds (0.3 s per GiB here); the pool's lock was
    held meanwhile, so /metrics, evict and load waited."""
    model = layered(2, (8,))
    write_file(tmp_path / "model.safetensors", model.stored)
    go, real = threading.Event(), os.posix_fallocate

    def slow(fd: int, offset: int, size: int) -> None:
        assert go.wait(10)
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    pool = Pool("me", pool_dir, 1 << 30, QUIET)
    pool.load("a", model.plan, open_checkpoint(tmp_path, model.plan))
    eventually(lambda: any(".a." in p.name for p in pool_dir.iterdir()))
    asked = threading.Thread(target=lambda: pool.used_bytes)
    asked.start()
    asked.join(1)
    stuck = asked.is_alive()
    go.set()
    pool.close()
    assert not stuck


def test_memory_of_an_evicted_model_is_waited_for(
    tmp_path: Path, pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pool-2: a filesystem no larger than the budget. Evicting a makes room for b in the budget at
    once, in memory only when the last worker has unmapped a."""
    model = layered(2, (64,))
    write_file(tmp_path / "model.safetensors", model.stored)
    real, unmapped = os.posix_fallocate, time.monotonic() + 0.5

    def full_until_unmapped(fd: int, offset: int, size: int) -> None:
        if time.monotonic() < unmapped:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, size)

    events: list[str] = []
    listener = Listener(
        lambda m: None, lambda m, s, t: events.append(m), lambda m, r: events.append(r)
    )
    sources = open_checkpoint(tmp_path, model.plan)
    pool = Pool("me", pool_dir, segment_bytes(model.plan), listener)
    pool.load("a", model.plan, sources)
    eventually(lambda: events == ["a"])
    monkeypatch.setattr(os, "posix_fallocate", full_until_unmapped)
    unmapped = time.monotonic() + 0.5
    pool.evict("a")
    pool.load("b", model.plan, sources)
    eventually(lambda: len(events) == 2)
    pool.close()
    assert events == ["a", "b"]


def test_another_users_lock_is_not_ours_to_judge(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pool-3: /dev/shm is shared by all users; another user's server kept ours from starting."""
    (pool_dir / "c2cserve.theirs.lock").touch()
    real = os.open

    def guarded(path: object, flags: int, mode: int = 0o777, **_: object) -> int:
        if "theirs" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", guarded)
    assert remove_dead_runs(pool_dir) == []


def test_a_lock_that_a_cleaner_took_and_removed_is_taken_again(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pool-3: between creating its lock file and locking it, a starting server's file looks like a
    dead run's. It then held the lock of a file that nobody could find: never cleaned up."""
    real, once = fcntl.flock, threading.Event()

    def flock(fd: int, operation: int) -> None:
        if not once.is_set():
            once.set()
            remove_dead_runs(pool_dir)  # the other server, just now
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    pool = Pool("me", pool_dir, 1 << 20, QUIET)
    assert (pool_dir / "c2cserve.me.lock").exists()
    assert remove_dead_runs(pool_dir) == []
    pool.close()


def test_a_cleaner_at_work_is_not_another_owner(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pool-3: the same moment from the other side: PoolError 'another run has the instance'."""
    real, cleaner = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not cleaner:
            held = os.open(pool_dir / "c2cserve.me.lock", os.O_RDWR)
            cleaner.append(held)
            real(held, fcntl.LOCK_EX)
            threading.Timer(0.1, os.close, [held]).start()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    Pool("me", pool_dir, 1 << 20, QUIET).close()


def test_a_dead_runs_name_can_be_used_again(pool_dir: Path, tmp_path: Path) -> None:
    """pool-3: files of a killed run of the same instance were in the way of the new one."""
    model = layered(2, (8,))
    write_file(tmp_path / "model.safetensors", model.stored)
    (pool_dir / "c2cserve.me.lock").touch()
    (pool_dir / "c2cserve.me.a.1").write_bytes(bytes(64))
    loaded: list[str] = []
    listener = Listener(
        lambda m: None, lambda m, s, t: loaded.append(m), lambda m, r: loaded.append(r)
    )
    pool = Pool("me", pool_dir, 1 << 20, listener)
    pool.load("a", model.plan, open_checkpoint(tmp_path, model.plan))
    eventually(lambda: bool(loaded))
    pool.close()
    assert loaded == ["a"]


def test_an_existing_file_is_not_removed_by_a_failed_create(tmp_path: Path) -> None:
    """pool-4"""
    (tmp_path / "segment").write_text("somebody's")
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path / "segment", LayoutPlan((), ()), {})
    assert (tmp_path / "segment").read_text() == "somebody's"


def test_a_checkpoint_deep_down(tmp_path: Path) -> None:
    """pool-4: the file's path was repeated per tensor, until the manifest was too long."""
    deep = tmp_path / "/".join(["d" * 200] * 5)
    deep.mkdir(parents=True)
    plan = layered_plan(50, (4,))
    write_zeros(deep / "model.safetensors", plan)
    sources = open_checkpoint(deep, plan)
    segment = Segment.create(tmp_path / "segment", plan, sources)
    assert segment.row_sources["layers.49"].path == deep / "model.safetensors"


def test_padding_stays_small_beside_the_weights() -> None:
    """pool-4: 30 layers of 2.2 MiB (66 MiB) took 120 MiB."""
    plan = layered_plan(30, (2200 << 8,))
    assert plan.bytes >= 64 << 20
    assert segment_bytes(plan) <= 1.05 * plan.bytes


@pytest.mark.parametrize(
    "part",
    [
        Part("s", (4,), "elsewhere"),
        Part("s", (4,), "t", 0, 2, 4),
        Part("s", (4,), "t", 0, -1, 4),
    ],
)
def test_a_part_outside_its_source_or_target(part: Part) -> None:
    """pool-5: KeyError, or a read of the neighbouring tensor's bytes."""
    plan = LayoutPlan((TensorPlan("t", (4,), "float32"),), (GroupPlan("g", (part,)),))
    with pytest.raises(PlanError):
        plan.check()


def test_an_index_nested_without_end(tmp_path: Path) -> None:
    """pool-6: RecursionError."""
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError):
        find_files(tmp_path)


def test_a_pipe_in_the_place_of_a_file(tmp_path: Path) -> None:
    """pool-6: opening it waited for a writer, for ever."""
    os.mkfifo(tmp_path / "x.safetensors")
    code = (
        "import sys; from pathlib import Path\n"
        "from c2cserve.memory.checkpoint import *\n"
        "try: read_header(Path(sys.argv[1]))\n"
        "except CheckpointError: sys.exit(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.safetensors")], timeout=5, check=False
    )
    assert done.returncode == 7


@pytest.mark.alone
def test_a_shape_of_a_million_dimensions(tmp_path: Path) -> None:
    """pool-6: the product of so many large numbers took minutes."""
    header = {"a": {"dtype": "F32", "shape": [(1 << 62) + 1] * 300_000, "data_offsets": [0, 4]}}
    path = raw_file(tmp_path / "f", json.dumps(header).encode(), bytes(4))
    begin = time.monotonic()
    with pytest.raises(CheckpointError):
        read_header(path)
    assert time.monotonic() - begin < 2


def test_a_missing_shard_without_an_index_is_named(tmp_path: Path) -> None:
    """pool-6: only 'tensor ... is missing' was said."""
    for i in (1, 3):
        write_file(tmp_path / f"model-{i:05}-of-00003.safetensors", {})
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors"):
        find_files(tmp_path)


def test_names_in_a_message_stay_on_its_line(tmp_path: Path) -> None:
    """pool-6: a tensor's name is the checkpoint's to choose."""
    header = {"a\nERROR all is lost\x1b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    raw_file(tmp_path / "model.safetensors", json.dumps(header).encode(), bytes(4))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, LayoutPlan((), ()))
    assert str(caught.value).isprintable()


@pytest.mark.alone
def test_demand_is_cheap_with_many_groups(tmp_path: Path) -> None:
    """pool-7: every chunk looked at every group's flag in turn, under the loader's lock (6,144
    experts: 1.6 ms per chunk)."""
    plan = layered_plan(6000, (4,))
    write_zeros(tmp_path / "model.safetensors", plan)
    sources = open_checkpoint(tmp_path, plan)
    loader = Loader(Segment.create(tmp_path / "s", plan, sources), plan, sources, threads=1)
    begin = time.monotonic()
    loader.run()
    assert time.monotonic() - begin < 2


def test_a_worker_can_say_why_weights_are_lost(tmp_path: Path) -> None:
    """pool-8"""
    model = layered(2, (8,))
    write_file(tmp_path / "model.safetensors", model.stored)
    sources = open_checkpoint(tmp_path, model.plan)
    segment = Segment.create(tmp_path / "s", model.plan, sources)
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(CheckpointError):
        Loader(segment, model.plan, sources).run()
    worker = Segment.open(tmp_path / "s")
    assert worker.state is State.FAILED
    assert "truncated" in worker.reason


def test_eviction_gives_memory_back_at_once(tmp_path: Path, pool_dir: Path) -> None:
    """pool-2: entry, loader and its callback were a cycle; the server itself kept an evicted
    segment mapped until a full garbage collection."""
    model = layered(2, (64,))
    write_file(tmp_path / "model.safetensors", model.stored)
    loaded = threading.Event()
    pool = Pool(
        "me", pool_dir, 1 << 20, Listener(lambda m: None, lambda m, s, t: loaded.set(), print)
    )
    gc.collect()
    gc.disable()
    try:
        pool.load("a", model.plan, open_checkpoint(tmp_path, model.plan))
        assert loaded.wait(10)
        path = str(pool.path("a"))
        assert path in Path("/proc/self/maps").read_text()
        pool.evict("a")
        eventually(lambda: path not in Path("/proc/self/maps").read_text(), 2)
    finally:
        gc.enable()
        pool.close()
