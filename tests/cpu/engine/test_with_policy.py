"""The executor under the real slice policy: short of KV memory, requests coming and going."""

import dataclasses
import itertools

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lane import LateModel
from late import LateOps
from policy_loop import MAX_NEW, SHARED, PolicyLoop, job, models

from c2cserve.core.request import BLOCK_TOKENS, FinishReason, Job

__all__ = ["models"]


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_everyone_gets_the_text_of_an_idle_slice(
    models: dict[str, LateModel], data: st.DataObject
) -> None:
    blocks = data.draw(st.integers(8, 16), "blocks")
    chunk = data.draw(st.sampled_from([16, 40, 512]), "chunk")
    world = PolicyLoop(
        models, blocks, chunk, host_blocks=data.draw(st.sampled_from([0, 4, 64]), "host")
    )
    jobs: dict[str, Job] = {}
    for i in range(data.draw(st.integers(1, 8), "requests")):
        shared = SHARED[: data.draw(st.sampled_from([0, 16, 32]))]
        prompt = shared + data.draw(st.lists(st.integers(3, 159), min_size=1, max_size=30))
        name = f"r{i}"
        jobs[name] = job(name, data.draw(st.sampled_from(sorted(models))), prompt)
    gone = data.draw(st.sets(st.sampled_from(sorted(jobs))), "leave")
    for name in jobs:
        world.submit(jobs[name])
        for _ in range(data.draw(st.integers(0, 6))):
            world.tick()
    for name in gone:
        world.withdraw(name)
    for _ in range(2000):
        world.tick()
        if all(world.ended(name) for name in jobs if name not in gone):
            break
    for name in jobs.keys() - gone:
        assert world.ended(name) is FinishReason.LENGTH
        alone = PolicyLoop(models, 64, 512)
        alone.submit(dataclasses.replace(jobs[name]))
        while not alone.ended(name):
            alone.tick()
        assert world.tokens(name) == alone.tokens(name)
    world.tick()
    world.tick()
    assert len(world.executor) == 0, "nothing is kept for those who left"
    assert world.policy.arena.held_bytes == 0
    assert world.host_kv.used_bytes == world.executor.prefixes.used_bytes


def test_preemption_and_prefix_reuse_do_happen_here(models: dict[str, LateModel]) -> None:
    """The property above is only worth something if these do."""
    world = PolicyLoop(models, 10, 512)
    names = [f"r{i}" for i in range(6)]
    for name, last in zip(names, itertools.count(3), strict=False):
        world.submit(job(name, "llama", [*SHARED, last]))
        world.tick()
    for _ in range(500):
        world.tick()
    assert all(world.ended(name) is FinishReason.LENGTH for name in names)
    assert world.policy.cached_tokens > 0
    tight = PolicyLoop(models, 8, 512)
    for name, last in zip(names, itertools.count(3), strict=False):
        tight.submit(job(name, "llama", [last] * 30))
    for _ in range(500):
        tight.tick()
    assert all(tight.ended(name) is FinishReason.LENGTH for name in names)
    assert tight.policy.preemptions > 0


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_that_do_not_fit_at_once_take_turns_and_compute_nothing_twice(
    models: dict[str, LateModel], overlapped: bool
) -> None:
    late = LateOps() if overlapped else None
    world = PolicyLoop(models, 8, 512, late, host_blocks=64)
    jobs = [job(f"r{i}", "llama", [3 + i] * 30) for i in range(6)]
    for one in jobs:
        world.submit(one)
        world.tick()
    for _ in range(600):
        before = world.computed
        world.tick()
        if late is not None and (len(late.samples) > 1 or world.computed == before):
            late.finish()  # one is always under way, unless the policy waits for it
    for one in jobs:
        alone = PolicyLoop(models, 64, 512)
        alone.submit(one)
        while not alone.ended(one.request.id):
            alone.tick()
        assert world.tokens(one.request.id) == alone.tokens(one.request.id)
        assert world.of(one.request.id)[0].cached_tokens == 0
    assert world.host_kv.counts.in_bytes > 0
    assert world.host_kv.used_bytes == world.executor.prefixes.used_bytes
    assert world.computed == sum(30 + MAX_NEW - 1 for _ in jobs)


def test_the_kv_of_prompts_goes_to_the_host_once(models: dict[str, LateModel]) -> None:
    """Blocks of a prompt are a prefix's on the host, and its requests' copies. What has drawn
    tokens in it is a request's own."""
    world = PolicyLoop(models, 64, 512, host_blocks=64)
    block = models["llama"].config.kv_block_bytes
    first = job("first", "llama", [*SHARED, *SHARED, *range(3, 10)])
    other = job("other", "llama", [*SHARED, *SHARED, *range(13, 20)])
    for one in (first, other):
        world.submit(one)
        while not world.ended(one.request.id):
            world.tick()
    for _ in range(3):
        world.tick()
    tokens = len(first.tokens) + MAX_NEW - 1
    own = tokens // BLOCK_TOKENS - len(first.request.prefix_hashes)
    assert own == 1
    assert world.executor.prefixes.counts.saved_bytes == 4 * block
    assert world.host_kv.counts.out_bytes <= 2 * own * block
    assert world.host_kv.counts.in_bytes == 0
