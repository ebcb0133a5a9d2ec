"""Any requests on a slice of any size: each ends once, and all memory comes back."""

from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slice_cases import SLOS, requests, world_of
from slice_world import SliceTestWorld

ONE_TOKEN = ("a", 1, 1, 2.0, 0, 0, 1, None, SLOS[0], False)
OVERLAPPED_PREFILL = [
    *[ONE_TOKEN] * 6,
    ("a", 97, 1, 1.125, 0, 6, 1, None, SLOS[0], False),
    ("a", 113, 1, 1.0, 0, 6, 1, None, SLOS[0], False),
    ("b", 1, 16, 0.0, 0, 0, 16, None, SLOS[0], False),
]
"""Two steps of a prompt are in flight, the second one is parked, and another request with the same
prefix waits. It may read the prompt's blocks only after both steps."""


@settings(max_examples=examples(150), deadline=None)
@example(OVERLAPPED_PREFILL, 857, 2, 2, 0.3, 0.0)
@given(
    requests, st.integers(0, 1000), st.integers(2, 24), st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.05]),
)  # fmt: skip
def test_every_request_ends_once_and_all_memory_comes_back(
    drawn: list, seed: int, slabs: int, in_flight: int, park: float, fail: float
) -> None:
    ends_and_gives_all_memory_back(world_of(drawn, seed, slabs, in_flight, park, fail))


SHORT = ("a", 1, 1, 0.0, 0, 0, 1, None, SLOS[0], False)
FILLS_THE_ARENA = [SHORT, SHORT, ("b", 192, 1, 0.0, 0, 0, 1, None, SLOS[0], False)]
"""Its prompt takes all blocks there are, and its only token needs none."""
OUTGROWS_THE_ARENA = [
    SHORT,
    (*SHORT[:3], 0.5, *SHORT[4:]),
    ("b", 192, 2, *SHORT[3:6], 2, *SHORT[7:]),
]
"""It is paused when its next token has no room anywhere."""


@settings(max_examples=examples(60), deadline=None)
@example(FILLS_THE_ARENA, 0, 3, 1, 0.0, 0.0, 1)
@example(OUTGROWS_THE_ARENA, 0, 3, 1, 0.0, 0.0, 20)
@given(
    requests, st.integers(0, 1000), st.integers(2, 24), st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.05]), st.sampled_from([1, 8, 20, 1000]),
)  # fmt: skip
def test_every_request_ends_once_where_kv_rotates(
    drawn: list, seed: int, slabs: int, in_flight: int, park: float, fail: float, host: int
) -> None:
    world = world_of(drawn, seed, slabs, in_flight, park, fail, host_blocks=host)
    ends_and_gives_all_memory_back(world)
    assert world.kv.host_bytes == world.kv.prefix_bytes, "KV of requests is left there"


def ends_and_gives_all_memory_back(world: SliceTestWorld) -> None:
    world.run()
    world.check_end()
    arena = world.policy.arena
    for name in "abc":
        world.deactivate(world.now, name)
    world.run()
    assert not arena._models
    assert not any(arena._taken)
    assert not any(arena._busy)


@settings(max_examples=examples(25), deadline=None)
@given(requests, st.integers(0, 1000), st.integers(2, 24))
def test_decisions_repeat_exactly(drawn: list, seed: int, slabs: int) -> None:
    worlds = [world_of(drawn, seed, slabs, 2, 0.3, 0.0) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].log == worlds[1].log
