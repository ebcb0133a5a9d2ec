from cluster_cases import random_world
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

# ---- properties ---------------------------------------------------------------------------------


@settings(max_examples=examples(120), deadline=None)
@given(st.integers(0, 10**6))
def test_every_request_ends_exactly_once(seed: int) -> None:
    world = random_world(seed)
    world.run()
    assert all(live.ended for live in world.jobs.values())
    assert not world.policy._where
    assert not world.policy._queue
    assert all(load.requests == 0 for load in world.policy._slices.values())
    assert not world.removing, "a removal never ended"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_decisions_repeat_exactly(seed: int) -> None:
    worlds = [random_world(seed) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].log == worlds[1].log
