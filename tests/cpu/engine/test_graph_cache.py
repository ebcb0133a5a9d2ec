"""Which decode graphs there are, and the pool they share: book-keeping, without a GPU."""

import gc

import pytest
import torch
from fake_graphs import FakeAllocator, install

from c2cserve.engine.gpu.graph_cache import GraphCache, GraphKey, bucket
from c2cserve.engine.gpu.graph_pool import Captured, CaptureError, GraphPool


def key(rows: int, *, model: int = 0, context: int = 1024) -> GraphKey:
    return GraphKey(0, model, rows, context, "hbm", 0)


# ---- sizes ---------------------------------------------------------------------------------------


def test_buckets_hold_their_steps_and_pad_little() -> None:
    sizes = sorted({bucket(seqs) for seqs in range(1, 513)})
    assert all(bucket(size) == size for size in sizes)
    for seqs in range(1, 1025):
        assert seqs <= bucket(seqs) < 2 * seqs or seqs == 1
        if seqs > 64:
            assert bucket(seqs) <= 1.06 * seqs
    assert len(sizes) < 64, "two contexts of a model have room in a slice's graphs"


def test_a_step_of_few_sequences_is_never_padded_beyond_64() -> None:
    """Above, GEMMs are others: bits of a row would depend on its batch."""
    assert all(bucket(seqs) <= 64 for seqs in range(1, 65))
    cache: GraphCache[str] = GraphCache()
    cache.put(key(68), "above")
    assert cache.larger(key(64)) is None
    assert cache.larger(key(48)) is None


# ---- which there are -----------------------------------------------------------------------------


def test_a_graph_is_wanted_when_its_size_is_met_again() -> None:
    cache: GraphCache[str] = GraphCache()
    assert [cache.meet(key(8)) for _ in range(2)] == [False, True]
    assert cache.wants(key(8))
    cache.put(key(8), "eight")
    assert cache.get(key(8)) == "eight"
    assert cache.get(key(8, context=2048)) is None
    assert cache.get(key(8, model=1)) is None


def test_a_larger_graph_serves_until_there_is_one() -> None:
    cache: GraphCache[str] = GraphCache()
    cache.put(key(32), "32")
    assert cache.larger(key(24)) == cache.larger(key(16)) == "32"
    assert cache.larger(key(8)) is None, "more than twice the rows"
    assert cache.larger(key(24, context=2048)) is None
    cache.put(key(24), "24")
    assert cache.larger(key(16)) == "24"


def test_a_sweep_through_all_sizes_captures_seldom() -> None:
    """Some at once; then one of eight steps pays for a capture."""
    cache: GraphCache[str] = GraphCache()
    captures = 0
    for rows in range(1, 513):
        cache.begin_step()
        captures += cache.wants(key(rows))
    assert 512 / 8 <= captures <= 512 / 8 + 8


def test_the_one_unused_for_longest_goes() -> None:
    cache: GraphCache[int] = GraphCache(most=3)
    for rows in (1, 2, 4):
        cache.put(key(rows), rows)
    assert cache.get(key(1)) == 1
    cache.put(key(8), 8)
    assert len(cache) == 3
    assert [cache.get(key(rows)) for rows in (1, 2, 4, 8)] == [1, None, 4, 8]
    assert cache.dropped == 1


def test_graphs_of_a_model_go_with_it() -> None:
    cache: GraphCache[str] = GraphCache()
    for model in (0, 1, 2):
        cache.put(key(72, model=model), f"of {model}")
        cache.meet(key(80, model=model))
    cache.forget(1)
    assert [cache.get(key(72, model=model)) for model in (0, 1, 2)] == ["of 0", None, "of 2"]
    assert [cache.meet(key(80, model=model)) for model in (0, 1, 2)] == [True, False, True]
    cache.keep_models({1})
    assert [cache.get(key(72, model=model)) for model in (0, 2)] == ["of 0", None]
    assert cache.dropped == 2


def test_what_could_not_be_captured_is_tried_again_ever_later() -> None:
    cache: GraphCache[str] = GraphCache()

    def steps_until_wanted() -> int:
        for steps in range(1, 10_000):
            cache.begin_step()
            if cache.wants(key(8)):
                return steps
        return 0

    waits: list[int] = []
    for _ in range(3):
        cache.refuse(key(8))
        waits.append(steps_until_wanted())
    assert waits == [256, 1024, 4096]
    cache.put(key(8), "graph")
    cache.forget(0)
    cache.refuse(key(8))
    assert steps_until_wanted() == 256, "what was captured since starts anew"


# ---- the pool ------------------------------------------------------------------------------------


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return install(monkeypatch)


def test_a_pool_that_its_last_graph_has_left_is_not_used_again(allocator: FakeAllocator) -> None:
    """torch refuses to capture into it."""
    pool = GraphPool()
    for _ in range(3):
        captured: Captured[int] = pool.capture(lambda: 7)
        other: Captured[int] = pool.capture(lambda: 8)
        assert (captured.result, other.result) == (7, 8)
        del captured, other
        gc.collect()
    assert len(allocator.users) == 3

    def alone() -> None:
        handle = torch.cuda.MemPool().id
        allocator._cuda_releasePool(0, handle)
        torch.cuda.CUDAGraph().capture_begin(pool=handle, capture_error_mode="thread_local")

    with pytest.raises(RuntimeError, match="use_count > 0"):
        alone()


def test_captures_go_on_after_a_first_one_that_fails(allocator: FakeAllocator) -> None:
    def launch() -> None:
        raise RuntimeError("a kernel")

    pool = GraphPool()
    with pytest.raises(CaptureError):
        pool.capture(launch)
    gc.collect()
    assert [pool.capture(lambda: 3).result for _ in range(2)] == [3, 3]
    assert not allocator.recording


@pytest.mark.parametrize("when", ["begin", "launch", "end"])
def test_captures_go_on_after_one_that_fails(allocator: FakeAllocator, when: str) -> None:
    pool = GraphPool()
    kept = pool.capture(lambda: 1)

    def launch() -> int:
        if when == "launch":
            raise RuntimeError("a kernel")
        return 2

    if when != "launch":
        allocator.fails.append(when)
    with pytest.raises(CaptureError):
        pool.capture(launch)
    gc.collect()
    assert not allocator.recording
    assert not allocator.asks_the_dead
    again = [pool.capture(lambda: 3) for _ in range(2)]
    assert (kept.result, [one.result for one in again]) == (1, [3, 3])
    assert len(allocator.users) == (1 if when == "launch" else 2), "a capture that ended well"
