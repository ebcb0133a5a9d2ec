"""Weights in what KV leaves of an arena: places, and who has to go."""

from dataclasses import dataclass, field

import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.policy.weights.hbm_residency import Residency

ARENA = 64 << 10
ROW = 512
"""Bytes of a row of a weight."""


@dataclass
class World:
    """A cache, and weights that are nowhere: only their addresses count."""

    arena: torch.Tensor = field(default_factory=lambda: torch.zeros(ARENA, dtype=torch.uint8))
    seen: dict[int, WeightHandle] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = HbmCache(self.arena, Residency(ARENA))
        for i, name in enumerate("abc"):
            self.cache.add(name, (i + 1) << 30, 1 << 20)

    def weight(self, model: str, index: int, rows: int) -> WeightHandle:
        address = ("abc".index(model) + 1 << 30) + index * 20_480
        return WeightHandle(address, (rows, ROW // 2), "bfloat16", "host")

    def start(self, w: WeightHandle) -> int:
        return w.pointer - self.arena.data_ptr()


def test_what_is_placed_is_found_and_what_kv_takes_is_gone_at_once() -> None:
    world = World()
    cache, w = world.cache, world.weight("a", 0, 8)
    cache.begin_step("a", 0.0, 0)
    assert cache.find(w) is None
    place = cache.place(w)
    assert place is not None
    assert (place.home, place.shape) == ("hbm", w.shape)
    assert world.start(place) + w.bytes == ARENA, "from the back"
    assert cache.find(w) == cache.location(w) == place
    assert (cache.counts.streamed_bytes, cache.counts.hit_bytes) == (w.bytes, w.bytes)
    cache.begin_step("a", 1.0, world.start(place))
    assert cache.find(w) == place, "KV ends where it begins"
    changes = cache.changes
    cache.begin_step("a", 2.0, world.start(place) + 1)
    assert cache.find(w) is None
    assert cache.location(w) == w
    assert (cache.bytes, cache.counts.dropped_bytes) == (0, w.bytes)
    assert cache.changes > changes


def test_a_model_that_leaves_takes_its_weights_along() -> None:
    world = World()
    world.cache.begin_step("b", 0.0, 0)
    ours, theirs = world.weight("b", 0, 4), world.weight("c", 0, 4)
    assert world.cache.place(ours)
    assert world.cache.place(theirs)
    world.cache.forget("b")
    assert world.cache.location(ours) == ours
    assert world.cache.location(theirs) != theirs


def test_nothing_is_kept_where_nobody_knows_how_far_kv_goes() -> None:
    world = World()
    world.cache.begin_step("a", 0.0, None)
    w = world.weight("a", 0, 1)
    assert not world.cache.wants(w)
    assert world.cache.place(w) is None


def test_graphs_run_while_nothing_more_would_be_kept() -> None:
    """`wants` says what `place` will do: else every step would try in vain."""
    world = World()
    world.cache.begin_step("a", 0.0, ARENA - 3 * ROW)
    large, small = world.weight("a", 0, 4), world.weight("a", 1, 2)
    assert not world.cache.wants(large)
    assert world.cache.wants(small)
    assert world.cache.place(small)
    assert not world.cache.wants(world.weight("a", 2, 2))


Moves = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 100)), max_size=60
)


@settings(max_examples=examples(150))
@given(Moves, st.lists(st.integers(1, 40), min_size=10, max_size=10))
def test_places_never_overlap_each_other_nor_kv(
    moves: list[tuple[str, int, int]], rows: list[int]
) -> None:
    world = World()
    cache, kept = world.cache, dict[int, WeightHandle]()
    for now, (model, index, part) in enumerate(moves):
        kv_end = ARENA * part // 100
        w = world.weight(model, index, rows[index])
        cache.begin_step(model, float(now), kv_end)
        kept = {address: one for address, one in kept.items() if cache.location(one) != one}
        wanted = cache.wants(w)
        if cache.find(w) is None and cache.place(w) is not None:
            kept[w.pointer] = w
            assert wanted
        kept = {address: one for address, one in kept.items() if cache.location(one) != one}
        spans = sorted(
            (world.start(at), world.start(at) + one.bytes)
            for one in kept.values()
            for at in (cache.location(one),)
        )
        bounds = [kv_end, *(edge for span in spans for edge in span), ARENA]
        assert bounds == sorted(bounds)
        assert cache.bytes == sum(stop - start for start, stop in spans)
