from itertools import pairwise
from random import Random

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.policy.slice.kv import KvArena

SLAB = 1024


def arena(slabs: int, **models: int) -> KvArena:
    made = KvArena(slabs * SLAB, SLAB)
    for name, block_bytes in models.items():
        made.add_model(name, block_bytes)
    return made


def take(kv: KvArena, model: str, count: int) -> list[int]:
    blocks = kv.allocate(model, count)
    assert blocks is not None
    return blocks


def cached_bytes(kv: KvArena) -> int:
    return sum(one.block_bytes * len(one.cached) for one in kv._models.values())


def cache(kv: KvArena, model: str, hashes: list[int]) -> list[int]:
    """Blocks that were computed, and are held no more."""
    blocks = take(kv, model, len(hashes))
    for block, value in zip(blocks, hashes, strict=True):
        kv.seal(model, block, value)
    kv.release(model, blocks)
    return blocks


def test_a_slab_belongs_to_one_model_and_blocks_are_byte_offsets() -> None:
    kv = arena(2, a=300, b=512)
    blocks_a, blocks_b = take(kv, "a", 3), take(kv, "b", 2)
    assert sorted(blocks_a) == [0, 300, 600]
    assert sorted(blocks_b) == [1024, 1536]
    assert kv.allocate("a", 1) is None
    assert kv.held_bytes == 3 * 300 + 2 * 512


def test_the_arena_is_used_from_its_front_and_says_how_far() -> None:
    kv = arena(4, a=512)
    assert kv.end_bytes == 0
    first, second = take(kv, "a", 2), take(kv, "a", 2)
    assert kv.end_bytes == 2 * SLAB
    kv.release("a", first)
    assert kv.end_bytes == 2 * SLAB, "what is behind a gap is still there"
    kv.release("a", second)
    assert kv.end_bytes == 0


def test_what_is_cached_makes_way_before_the_arena_grows_beyond_its_part() -> None:
    kv = KvArena(4 * SLAB, SLAB)
    kv.limit_cache(0.5)
    for name in ("a", "b"):
        kv.add_model(name, 512)
    cache(kv, "a", [1, 2, 3, 4])
    held = take(kv, "b", 2)
    assert kv.end_bytes == 2 * SLAB
    assert kv.match("a", [3, 4]) == [], "the oldest went"
    held += take(kv, "b", 6)
    assert kv.end_bytes == 4 * SLAB, "what is held may take all of it"
    assert len(set(held)) == 8


def test_an_empty_slab_changes_hands_without_being_asked_for() -> None:
    kv = arena(1, a=512, b=256)
    blocks = take(kv, "a", 2)
    assert kv.available("b") == 0
    kv.release("a", blocks)
    assert kv.available("b") == kv.capacity("b") == 4
    assert len(take(kv, "b", 4)) == 4


def test_a_block_larger_than_a_slab_takes_neighbouring_slabs() -> None:
    kv = arena(7, big=2 * SLAB + 1, small=SLAB)
    assert kv.capacity("big") == 2
    [small] = take(kv, "small", 1)
    assert small == 0
    assert take(kv, "big", 1) == [3 * SLAB]
    assert kv.allocate("big", 1) is None, "slabs 1 and 2 are not enough"
    kv.release("small", [small])
    assert take(kv, "big", 1) == [0]


def test_capacity_is_reached_whatever_was_there_before() -> None:
    kv = arena(4, big=2 * SLAB, small=SLAB)
    first = take(kv, "small", 1)
    one = take(kv, "big", 1)
    kv.release("small", first)
    assert len(one + take(kv, "big", 1)) == kv.capacity("big") == 2


def test_cached_prefix_is_found_shared_and_counted_once() -> None:
    kv = arena(2, a=256)
    blocks = cache(kv, "a", [1, 2, 3])
    assert kv.held_bytes == 0
    assert cached_bytes(kv) == 3 * 256
    assert kv.match("a", [1, 2, 9, 3]) == blocks[:2]
    assert kv.match("a", [1]) == blocks[:1]
    assert kv.held_bytes == 2 * 256
    kv.release("a", blocks[:1])
    assert kv.held_bytes == 2 * 256, "the other reader still has it"
    kv.release("a", blocks[:2])
    assert kv.held_bytes == 0
    assert cached_bytes(kv) == 3 * 256


def test_models_do_not_find_each_others_blocks() -> None:
    kv = arena(2, a=256, b=256)
    cache(kv, "a", [1])
    assert kv.match("b", [1]) == []


def test_an_unsealed_block_is_never_found() -> None:
    kv = arena(1, a=256)
    blocks = take(kv, "a", 2)
    kv.seal("a", blocks[0], 1)
    kv.release("a", blocks)
    assert kv.match("a", [1, 2]) == blocks[:1]


def test_an_unsealed_shared_block_is_found_no_more_and_stays_with_its_holders() -> None:
    kv = arena(1, a=256)
    cache(kv, "a", [1, 2])
    first, second = kv.match("a", [1, 2]), kv.match("a", [1])
    kv.unseal("a", first)
    assert kv.match("a", [1]) == []
    kv.release("a", first)
    assert kv.held_bytes == 256, "the other holder reads it"
    assert not set(take(kv, "a", 3)) & set(second)
    kv.release("a", second)
    assert kv.available("a") == 1


def test_own_cached_blocks_go_least_recently_used_first_and_from_the_end_of_a_prefix() -> None:
    kv = arena(1, a=256)
    old = cache(kv, "a", [1, 2])
    new = cache(kv, "a", [3, 4])
    kv.release("a", kv.match("a", [1]))
    assert take(kv, "a", 1) == old[1:]
    assert take(kv, "a", 1) == new[1:]
    assert kv.match("a", [1, 2]) == old[:1]


def test_another_model_takes_the_slab_that_was_idle_longest() -> None:
    kv = arena(3, a=1024, b=512, c=512)
    cache(kv, "a", [1])
    cache(kv, "b", [2, 3])
    held = take(kv, "a", 1)
    take(kv, "c", 1)
    assert kv.match("a", [1]) == [], "it was released first"
    assert len(kv.match("b", [2, 3])) == 2
    assert kv.held_bytes == 1024 + 512 + 2 * 512
    kv.release("a", held)


def test_own_old_blocks_go_before_the_recent_ones_of_others() -> None:
    kv = arena(2, a=512, b=512)
    cache(kv, "a", [1, 2])
    cache(kv, "b", [3, 4])
    take(kv, "a", 1)
    assert len(kv.match("b", [3, 4])) == 2


def test_a_refused_allocation_evicts_nothing() -> None:
    kv = arena(1, a=256)
    cache(kv, "a", [1, 2, 3])
    assert kv.allocate("a", 5) is None
    assert len(kv.match("a", [1, 2, 3])) == 3


def test_the_second_block_of_the_same_content_stays_anonymous() -> None:
    kv = arena(1, a=256)
    first, second = take(kv, "a", 1), take(kv, "a", 1)
    kv.seal("a", first[0], 7)
    kv.seal("a", second[0], 7)
    kv.release("a", second)
    assert kv.match("a", [7]) == first
    assert cached_bytes(kv) == 0


def test_a_removed_model_leaves_nothing() -> None:
    kv = arena(2, a=256, b=2048)
    cache(kv, "a", [1, 2])
    held = take(kv, "a", 1)
    with pytest.raises(AssertionError):
        kv.remove_model("a")
    kv = arena(2, a=256, b=2048)
    cache(kv, "a", [1, 2])
    kv.remove_model("a")
    assert len(take(kv, "b", 1)) == len(held) == 1


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 10**6))
def test_room_that_is_promised_is_there_and_nothing_is_owned_twice(seed: int) -> None:
    random = Random(seed)
    sizes = {f"m{i}": random.choice([100, 256, 1000, 1024, 1500, 5000]) for i in range(3)}
    kv = arena(random.randint(1, 12), **sizes)
    held: dict[str, list[list[int]]] = {name: [] for name in sizes}
    for _ in range(60):
        name = random.choice(list(sizes))
        if held[name] and random.random() < 0.5:
            blocks = held[name].pop(random.randrange(len(held[name])))
            if random.random() < 0.2:
                kv.unseal(name, blocks)
                assert not set(blocks) & set(kv._models[name].hashes)
            for block in blocks:
                if random.random() < 0.5 and block not in kv._models[name].sharers:
                    kv.seal(name, block, random.randrange(30))
            kv.release(name, blocks)
        elif random.random() < 0.3:
            found = kv.match(name, [random.randrange(30) for _ in range(3)])
            if found:
                held[name].append(found)
        else:
            available = kv.available(name)
            want = random.randint(1, 6)
            blocks = kv.allocate(name, want)
            assert (blocks is not None) == (want <= available)
            if blocks is not None:
                assert len(set(blocks)) == want
                assert kv.available(name) == available - want
                held[name].append(blocks)
        check(kv, sizes, held)
    for name, lists in held.items():
        for blocks in lists:
            kv.release(name, blocks)
    for name in sizes:
        assert kv.available(name) == kv.capacity(name)


def check(kv: KvArena, sizes: dict[str, int], held: dict[str, list[list[int]]]) -> None:
    """Every held block lies in the arena and in slabs that no other model has."""
    slabs: dict[int, str] = {}
    spans: dict[int, int] = {}
    for name, lists in held.items():
        for offset in {block for blocks in lists for block in blocks}:
            end = offset + sizes[name]
            assert end <= kv.slabs * SLAB
            assert spans.setdefault(offset, end) == end
            for slab in range(offset // SLAB, (end - 1) // SLAB + 1):
                assert slabs.setdefault(slab, name) == name
    ordered = sorted(spans.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))
    assert kv.held_bytes == sum(end - begin for begin, end in ordered)
