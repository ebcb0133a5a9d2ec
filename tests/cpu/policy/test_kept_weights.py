"""A live slice that knows its memory and link: who is kept, what KV leaves, and refused loads."""

from random import Random

import pytest
from controller_hand import Hand, dispatched
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import Activate, Fetch, Release
from c2cserve.core.events import InstanceReady, StepTimes
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.policy.slice.batching import BY_HEADROOM, ActiveModel
from c2cserve.policy.slice.estimate import StepTime
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.slice.strategies import live_strategies
from c2cserve.policy.weights.weight_memory import WeightMemory
from c2cserve.policy.weights.weight_swapping import WeightSwapping


def gpu(name: str, hbm_bytes: int = 100, link_bytes_per_s: float = 10.0) -> Slice:
    return Slice(
        name, "gpu", kv_bytes=hbm_bytes, slab_bytes=1, gpu=GpuShare(name, 1), hbm_bytes=hbm_bytes,
        link=name, link_bytes_per_s=link_bytes_per_s, max_batch=4,
    )  # fmt: skip


def test_slices_swap_weights_where_memory_and_link_are_known() -> None:
    assert isinstance(live_strategies(gpu("g")).memory, WeightSwapping)
    assert live_strategies(gpu("g")).arena.weights_above
    for unknown in (gpu("g", link_bytes_per_s=0.0), Slice("c", "cpu")):
        assert type(live_strategies(unknown).memory) is WeightMemory


class Kept:
    """Books of a slice's weights; a slab is one byte, and so is a block."""

    def __init__(self, hbm_bytes: int = 100) -> None:
        strategies = live_strategies(gpu("g", hbm_bytes))
        self.arena = strategies.arena
        assert isinstance(strategies.memory, WeightSwapping)
        self.memory = strategies.memory

    def activate(self, name: str, size: int) -> ActiveModel:
        model = ActiveModel(name, name, 1, StepTime(), BY_HEADROOM)
        self.arena.add_model(name, 1)
        self.memory.activated(model, ModelSpec(name, size, 1, 1, 4096))
        return model

    def ask(self, model: ActiveModel, name: str, now: float) -> None:
        model.add(Request(name, model.name, 20, 50, now, Slo(2.0, 0.1)), False)
        self.memory.requested(model.name, now)


def test_weights_wait_for_room_above_kv() -> None:
    """The books count slabs. Those that are free below KV are too small for a matrix."""
    slice_ = Kept()
    model = slice_.activate("m", 60)
    blocks = slice_.arena.allocate("m", 50)
    assert blocks is not None
    slice_.arena.release("m", sorted(blocks)[:49])  # one block is left, far up
    slice_.ask(model, "r", 0.0)
    assert slice_.memory.plan(0.0, {}) == []
    slice_.arena.release("m", sorted(blocks)[49:])
    assert not slice_.memory.computes("m")
    assert slice_.memory.plan(10.5, {}) == [Fetch("m")]


def test_prompts_use_weights_as_they_arrive_and_other_tokens_wait() -> None:
    slice_ = Kept()
    model = slice_.activate("m", 60)
    slice_.ask(model, "r", 0.0)
    assert not slice_.memory.computes("m")
    assert slice_.memory.plan(0.0, {}) == [Fetch("m")]
    assert slice_.memory.computes("m")
    assert slice_.memory.streams("m") is False
    model.started = 1
    assert not slice_.memory.computes("m"), "its next token is not due before all is there"
    slice_.memory.fetched("m", 1.0)
    assert slice_.memory.computes("m")


def test_a_model_that_waits_for_kv_of_its_own_streams() -> None:
    slice_ = Kept()
    model = slice_.activate("m", 60)
    blocks = slice_.arena.allocate("m", 50)
    slice_.ask(model, "r", 0.0)
    assert slice_.memory.plan(0.0, {}) == []
    assert slice_.memory.break_deadlock() == []
    assert slice_.memory.computes("m")
    assert slice_.memory.plan(1.0, {}) == []
    assert slice_.memory.plan(10.0, {}) == [], "KV reaches as far as before"
    assert blocks is not None
    slice_.arena.release("m", blocks)
    assert slice_.memory.plan(10.5, {}) == [Fetch("m")]


def test_a_refused_model_asks_for_more_room_before_it_streams() -> None:
    slice_ = Kept()
    model, other = slice_.activate("m", 60), slice_.activate("n", 33)
    slice_.ask(other, "s", 0.0)
    assert slice_.memory.plan(0.0, {}) == [Fetch("n")]
    slice_.memory.fetched("n", 1.0)
    other.seqs.clear()
    slice_.ask(model, "r", 1.0)
    assert slice_.memory.plan(1.0, {}) == [Fetch("m")]
    slice_.memory.refused("m")
    assert slice_.memory.plan(1.1, {}) == [Fetch("m")], "63 and 33"
    slice_.memory.refused("m")
    assert slice_.memory.plan(1.2, {}) == [Release("n"), Fetch("m")], "67 and 33 are too much"
    slice_.memory.refused("m")
    assert slice_.memory.computes("m")
    assert slice_.arena.available("m") == 100, "it takes no memory"
    assert slice_.memory.plan(2.0, {}) == []
    assert slice_.memory.plan(22.5, {}) == [Fetch("m")], "now and then it is tried again"


def test_a_model_that_kv_displaced_is_loaded_again() -> None:
    slice_ = Kept()
    model = slice_.activate("a", 60)
    slice_.ask(model, "r", 0.0)
    slice_.memory.plan(0.0, {})
    slice_.memory.fetched("a", 6.0)
    slice_.memory.refused("a")
    assert slice_.memory.plan(1.0, {}) == [Fetch("a")]
    slice_.memory.refused("unknown")
    slice_.memory.ended(model)
    slice_.memory.refused("a")


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 10**9))
def test_kv_never_grows_beyond_the_line_of_weights(seed: int) -> None:
    """Weights lie at the end of the arena; no KV is there that was not there before them."""
    random = Random(seed)
    arena = KvArena(60, 1)
    arena.limit_cache(0.5)
    arena.weights_above = True
    for name in "ab":
        arena.add_model(name, 1)
    held: list[tuple[str, int]] = []
    hashes, line = 0, 60
    for _ in range(150):
        name, what = random.choice("ab"), random.random()
        if what < 0.45:
            blocks = arena.allocate(name, random.randint(1, 8))
            for offset in blocks or ():
                assert offset < line
                held.append((name, offset))
                if random.random() < 0.5:
                    hashes += 1
                    arena.seal(name, offset, hashes)
        elif what < 0.85 and held:
            owner, offset = held.pop(random.randrange(len(held)))
            arena.release(owner, [offset])
        else:
            line = 60 - random.randint(0, arena.free_slabs)
            arena.withhold(60 - line)
            top = max((offset + 1 for _, offset in held), default=0)
            assert arena.end_bytes <= max(line, top), "what is cached has made way"


@pytest.fixture
def hand() -> Hand:
    return Hand(gpu("g", 1000, 1e6), models="", budget=1000)


def sized(name: str, size: int) -> ModelSpec:
    return ModelSpec(name, size, 1, 1, 4096)


def test_what_fits_is_kept_also_before_any_time_is_known(hand: Hand) -> None:
    hand.ready(sized("a", 300), sized("b", 300))
    first = hand.arrive("a1", model="a")
    assert Activate("a", "g", keep=True) in first
    assert dispatched(first) == {"a1": "g"}
    assert dispatched(hand.arrive("a2", model="a")) == {"a2": "g"}, "beside one that is unknown"
    other = hand.arrive("b1", model="b")
    assert Activate("b", "g", keep=True) in other
    assert dispatched(other) == {"b1": "g"}
    load = hand.policy._slices["g"]
    assert load.keeps
    assert not load.active["a"].ready
    hand.tell(InstanceReady("a", "g", 0.3))
    assert load.active["a"].ready
    hand.tell(StepTimes("g", "a", 0.01, 0.001), StepTimes("g", "b", 0.01, 0.001))
    assert dispatched(hand.arrive("a3", model="a")) == {"a3": "g"}


def test_a_model_larger_than_the_memory_streams(hand: Hand) -> None:
    hand.policy._pool.budget_bytes = 10_000
    hand.ready(sized("a", 3000))
    actions = hand.arrive("a1", model="a")
    assert Activate("a", "g", keep=False) in actions
    assert hand.policy._slices["g"].active["a"].streams


def test_weights_leave_before_a_fetch_takes_their_place() -> None:
    slice_ = Kept()
    first, second = slice_.activate("a", 60), slice_.activate("b", 60)
    slice_.ask(first, "r", 0.0)
    slice_.memory.plan(0.0, {})
    slice_.memory.fetched("a", 6.0)
    first.seqs.clear()
    slice_.ask(second, "s", 7.0)
    assert slice_.memory.plan(7.0, {}) == [Release("a"), Fetch("b")]
