"""The pool: what is loaded, what it may take, and that nothing is left of what went."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkpoints import Model, layered, layered_plan, write_file, write_zeros
from readers import GatedReader, ThrottledReader, eventually

from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.layout import LayoutPlan
from c2cserve.memory.loader import Read, pread
from c2cserve.memory.pool import Listener, Pool, PoolError
from c2cserve.memory.segment import Segment, State, segment_bytes

Event = tuple[str, ...]


@dataclass(slots=True)
class Heard:
    """What a listener was told, in order."""

    events: list[Event] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def listener(self) -> Listener:
        return Listener(
            usable=lambda model: self.events.append(("usable", model)),
            loaded=self._loaded,
            failed=self._failed,
        )

    def _loaded(self, model: str, size: int, took_s: float) -> None:
        assert took_s >= 0
        self.sizes[model] = size
        self.events.append(("loaded", model))

    def _failed(self, model: str, reason: str) -> None:
        self.reasons[model] = reason
        self.events.append(("failed", model))


@dataclass(slots=True)
class Bench:
    """Pools in one directory, and models on disk beside it."""

    directory: Path
    disk: Path
    heard: Heard = field(default_factory=Heard)
    pools: list[Pool] = field(default_factory=list)

    def pool(
        self, budget_bytes: int = 1 << 30, *, name: str = "me", read: Read = pread, threads: int = 2
    ) -> Pool:
        pool = Pool(
            name, self.directory, budget_bytes, self.heard.listener, threads=threads, read=read
        )
        self.pools.append(pool)
        return pool

    def model(self, name: str, layers: int = 3, shape: tuple[int, ...] = (64, 8)) -> Model:
        (self.disk / name).mkdir()
        model = layered(layers, shape)
        write_file(self.disk / name / "model.safetensors", model.stored)
        return model

    def load(self, pool: Pool, name: str, plan: LayoutPlan) -> None:
        pool.load(name, plan, open_checkpoint(self.disk / name, plan))

    def wait_for(self, *event: str) -> None:
        eventually(lambda: event in self.heard.events)

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def bench(pool_dir: Path, tmp_path: Path) -> Iterator[Bench]:
    (tmp_path / "disk").mkdir()
    bench = Bench(pool_dir, tmp_path / "disk")
    yield bench
    for pool in bench.pools:
        pool.close()
    assert bench.files == []


def test_a_load_from_cold_to_ready(bench: Bench) -> None:
    model = bench.model("a")
    pool = bench.pool()
    bench.load(pool, "a", model.plan)
    bench.wait_for("loaded", "a")
    assert bench.heard.events == [("usable", "a"), ("loaded", "a")]
    assert pool.used_bytes == segment_bytes(model.plan) == bench.heard.sizes["a"]
    assert pool.loaded_bytes("a") == model.plan.bytes
    worker = Segment.open(pool.path("a"))
    for i in range(3):
        assert worker.raw(f"layers.{i}").tobytes() == model.expected(f"layers.{i}")


def test_load_returns_at_once_and_the_first_layer_is_usable_before_the_last(bench: Bench) -> None:
    """A worker computes on layer 0, out of its own mapping, while layer 2 is still on the disk."""
    model = bench.model("a")
    gate = GatedReader()
    pool = bench.pool(read=gate, threads=1)
    bench.load(pool, "a", model.plan)
    assert bench.heard.events == []
    gate.allow(1)
    bench.wait_for("usable", "a")
    worker = Segment.open(pool.path("a"))
    assert worker.ready(0)
    assert not worker.ready(2)
    assert worker.state is State.LOADING
    assert worker.raw("layers.0").tobytes() == model.expected("layers.0")
    assert pool.loaded_bytes("a") == model.plan.bytes // 3
    gate.open()
    bench.wait_for("loaded", "a")


def test_progress_of_a_slow_load(bench: Bench) -> None:
    model = bench.model("a", layers=6)
    pool = bench.pool(read=ThrottledReader(100e3, 256))
    bench.load(pool, "a", model.plan)
    seen = [0]
    while ("loaded", "a") not in bench.heard.events:
        seen.append(pool.loaded_bytes("a"))
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    assert pool.loaded_bytes("a") == model.plan.bytes
    assert pool.loaded_bytes("unheard of") == 0


def test_several_models_load_together(bench: Bench) -> None:
    models = {name: bench.model(name, shape=(32, 32)) for name in "abcdefgh"}
    pool = bench.pool()
    for name, model in models.items():
        bench.load(pool, name, model.plan)
    for name, model in models.items():
        bench.wait_for("loaded", name)
        segment = Segment.open(pool.path(name))
        assert segment.raw("layers.2").tobytes() == model.expected("layers.2")


# ---- budget -------------------------------------------------------------------------------------


def test_the_budget_is_kept_to_the_byte(bench: Bench) -> None:
    models = {name: bench.model(name) for name in "abc"}
    size = segment_bytes(models["a"].plan)
    pool = bench.pool(2 * size)
    bench.load(pool, "a", models["a"].plan)
    bench.load(pool, "b", models["b"].plan)
    with pytest.raises(PoolError) as caught:
        bench.load(pool, "c", models["c"].plan)
    message = str(caught.value)
    assert "c takes" in message
    assert f"{size} bytes" in message
    assert f"{2 * size} left" in message or f"of {2 * size}" in message
    assert len(message.splitlines()) == 1
    assert pool.used_bytes == 2 * size
    pool.evict("a")
    assert pool.used_bytes == size
    bench.load(pool, "c", models["c"].plan)
    for name in "bc":
        bench.wait_for("loaded", name)


def test_a_model_is_in_the_pool_once(bench: Bench) -> None:
    model = bench.model("a")
    pool = bench.pool()
    bench.load(pool, "a", model.plan)
    with pytest.raises(PoolError, match="a is in the pool already"):
        bench.load(pool, "a", model.plan)


def test_evict_and_load_again(bench: Bench) -> None:
    model = bench.model("a")
    pool = bench.pool()
    bench.load(pool, "a", model.plan)
    bench.wait_for("loaded", "a")
    first = pool.path("a")
    worker = Segment.open(first)
    pool.evict("a")
    pool.evict("a")  # what is gone can be evicted again
    assert pool.used_bytes == 0
    assert bench.files == ["c2cserve.me.lock"]
    with pytest.raises(KeyError):
        pool.path("a")
    bench.heard.events.clear()
    bench.load(pool, "a", model.plan)
    bench.wait_for("loaded", "a")
    assert pool.path("a") != first, "a late reader of the old one cannot take it for the new one"
    assert worker.raw("layers.1").tobytes() == model.expected("layers.1")
    again = Segment.open(pool.path("a"))
    assert again.raw("layers.1").tobytes() == model.expected("layers.1")


def test_any_model_name_is_a_file_name(bench: Bench) -> None:
    names = ["meta-llama/Llama-3.1-8B", "../../escape", "ü" * 300, "a b\n*?", ".", "x.lock"]
    plan = layered_plan(1, (4,))
    (bench.disk / "m").mkdir()
    write_zeros(bench.disk / "m" / "model.safetensors", plan)
    pool = bench.pool()
    for name in names:
        pool.load(name, plan, open_checkpoint(bench.disk / "m", plan))
    for name in names:
        bench.wait_for("loaded", name)
        assert pool.path(name).parent == bench.directory
    assert len({pool.path(name) for name in names}) == len(names)


# ---- what goes wrong ----------------------------------------------------------------------------


def test_a_cancelled_load_leaves_nothing_and_says_nothing(bench: Bench) -> None:
    model = bench.model("a", layers=20)
    gate = GatedReader()
    pool = bench.pool(read=gate, threads=2)
    bench.load(pool, "a", model.plan)
    gate.wait_for_reads(2)
    path = pool.path("a")
    worker = Segment.open(path)
    pool.evict("a")
    assert bench.files == ["c2cserve.me.lock"]
    gate.open()
    eventually(lambda: worker.state is State.FAILED)
    assert len(gate.offsets) == 2, "no more is read"
    pool.close()
    bench.pools.clear()
    assert bench.heard.events == []


def test_a_load_that_waits_for_its_turn_can_be_cancelled(bench: Bench) -> None:
    models = {name: bench.model(name) for name in "abc"}
    gate = GatedReader()
    pool = bench.pool(read=gate, threads=1)
    for name in "abc":
        bench.load(pool, name, models[name].plan)
    gate.wait_for_reads(2)  # a and b are loading; c waits for one of them
    pool.evict("c")
    gate.open()
    bench.wait_for("loaded", "a")
    bench.wait_for("loaded", "b")
    pool.close()
    bench.pools.clear()
    assert not any(model == "c" for _, model in bench.heard.events)


def test_closing_in_the_middle_of_a_load(bench: Bench) -> None:
    gate = GatedReader()
    pool = bench.pool(read=gate, threads=1)
    for name in "abcd":
        bench.load(pool, name, bench.model(name).plan)
    gate.wait_for_reads(2)
    threading.Timer(0.05, gate.open).start()
    pool.close()
    bench.pools.clear()
    assert bench.files == []


def test_a_failed_load_is_reported_once_and_its_memory_is_free(bench: Bench) -> None:
    model = bench.model("a")
    pool = bench.pool(threads=1)
    sources = open_checkpoint(bench.disk / "a", model.plan)
    os.truncate(bench.disk / "a" / "model.safetensors", sources["model.layers.1.weight"].offset)
    pool.load("a", model.plan, sources)
    bench.wait_for("failed", "a")
    assert "model.safetensors: ended at byte" in bench.heard.reasons["a"]
    assert bench.heard.events == [("usable", "a"), ("failed", "a")]
    assert pool.used_bytes == 0
    assert bench.files == ["c2cserve.me.lock"]


def test_a_checkpoint_that_vanished(bench: Bench) -> None:
    model = bench.model("a")
    pool = bench.pool()
    sources = open_checkpoint(bench.disk / "a", model.plan)
    shutil.rmtree(bench.disk / "a")
    pool.load("a", model.plan, sources)
    bench.wait_for("failed", "a")
    assert "model.safetensors" in bench.heard.reasons["a"]
    assert bench.files == ["c2cserve.me.lock"]


def test_full_shared_memory_is_explained_with_numbers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the budget, but the filesystem has less (a container's 64 MiB)."""
    model = bench.model("a")
    pool = bench.pool()
    real: Callable[[int, int, int], None] = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    bench.load(pool, "a", model.plan)
    bench.wait_for("failed", "a")
    reason = bench.heard.reasons["a"]
    assert str(segment_bytes(model.plan)) in reason
    assert str(bench.directory) in reason
    assert "--shm-size" in reason
    assert bench.files == ["c2cserve.me.lock"]
    monkeypatch.setattr(os, "posix_fallocate", real)
    bench.heard.events.clear()
    bench.load(pool, "a", model.plan)
    bench.wait_for("loaded", "a")
