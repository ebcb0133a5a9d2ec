from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from slice_world import SliceTestWorld

from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Request, Slo

SLAB = 4096
SLOS = [Slo(0.1, 0.01), Slo(1.0, 0.1), Slo(8.0, 1.0)]


def spec(name: str = "m", block: int = 512) -> ModelSpec:
    return ModelSpec(name, 1 << 20, 2, block, 4096)


def small_slice(slabs: int = 16, max_batch: int = 8, tokens: int = 64) -> Slice:
    return Slice(
        "s", "cpu", kv_bytes=slabs * SLAB, slab_bytes=SLAB, max_batch=max_batch,
        max_step_tokens=tokens,
    )  # fmt: skip


def request(
    name: str, model: str = "m", prompt: int = 20, new: int = 8, at: float = 0.0, family: int = 0,
    slo: Slo = SLOS[1], shared: int = 0,
) -> Request:  # fmt: skip
    """The first `shared` blocks' hashes are those of its family, the others its own."""
    hashes = tuple(
        (family if i < shared else hash_of(name)) * 1000 + i for i in range(prompt // BLOCK_TOKENS)
    )
    return Request(name, model, prompt, new, at, slo, hashes)


def hash_of(name: str) -> int:
    return 100 + sum(ord(c) * 31**i for i, c in enumerate(name))


requests = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 200), st.integers(1, 40), st.floats(0, 2),
        st.integers(0, 2), st.integers(0, 12), st.integers(1, 60), st.none() | st.floats(0, 3),
        st.sampled_from(SLOS), st.booleans(),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


def world_of(
    drawn: list, seed: int, slabs: int, in_flight: int, park: float, fail: float,
    blocks: tuple[int, int, int] = (512, 1000, 6000), host_blocks: int = 0,
) -> SliceTestWorld:  # fmt: skip
    specs = [spec(name, block) for name, block in zip("abc", blocks, strict=True)]
    slice_ = replace(small_slice(slabs), host_kv_bytes=host_blocks * 1000)
    world = SliceTestWorld(slice_, seed, specs, in_flight, park, fail, contents=True)
    world.activate()
    for i, (model, prompt, new, at, family, shared, stop, cancel, slo, chained) in enumerate(drawn):
        one = request(f"r{i}", model, prompt, new, at, family, slo, shared)
        world.submit_at(at, one, stop, chained)
        if cancel is not None:
            world.withdraw(at + cancel, one.id)
    return world


ONE_TOKEN = ("a", 1, 1, 2.0, 0, 0, 1, None, SLOS[0], False)
OVERLAPPED_PREFILL = [
    *[ONE_TOKEN] * 6,
    ("a", 97, 1, 1.125, 0, 6, 1, None, SLOS[0], False),
    ("a", 113, 1, 1.0, 0, 6, 1, None, SLOS[0], False),
    ("b", 1, 16, 0.0, 0, 0, 16, None, SLOS[0], False),
]
"""Two steps of a prompt are in flight, the second one is parked, and another request with the same
prefix waits. It may read the prompt's blocks only after both steps."""


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=60, deadline=None)
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
    assert world.kv.host_bytes == 0


def ends_and_gives_all_memory_back(world: SliceTestWorld) -> None:
    world.run()
    for job in world.jobs.values():
        assert job.ended
        if job.ended == "finished":
            assert job.drawn == job.owed
    assert world.policy.running == world.policy.waiting == 0
    arena = world.policy.arena
    assert arena.held_bytes == 0
    for name in "abc":
        world.deactivate(world.now, name)
    world.run()
    assert not arena._models
    assert not any(arena._taken)
    assert not any(arena._busy)


@settings(max_examples=25, deadline=None)
@given(requests, st.integers(0, 1000), st.integers(2, 24))
def test_decisions_repeat_exactly(drawn: list, seed: int, slabs: int) -> None:
    worlds = [world_of(drawn, seed, slabs, 2, 0.3, 0.0) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].log == worlds[1].log
