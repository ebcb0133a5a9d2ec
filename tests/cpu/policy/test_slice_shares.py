"""Tenants on one slice: how much one of them is slowed down by what others send."""

from dataclasses import replace

import pytest
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slice_cases import SLOS, request, small_slice, spec, world_of
from slice_cases import requests as drawn_requests
from slice_world import SliceTestWorld

from c2cserve.core.events import Submitted
from c2cserve.core.request import Request

_TOKEN_S = 0.001
_ASKED = 5


def of(tenant: str, name: str, model: str = "m", at: float = 0.0, new: int = 30) -> Request:
    return replace(request(name, model, prompt=16, new=new, at=at), tenant=tenant)


def loop_times(flood: int, model: str, seed: int = 0) -> list[float]:
    """Seconds that each of some requests takes that one tenant sends one after another, beside
    `flood` long ones of another tenant."""
    world = SliceTestWorld(
        small_slice(400, max_batch=64), seed, [spec("m"), spec("other")], token_s=_TOKEN_S
    )
    world.activate()
    for number in range(flood):
        world.submit_at(0.0, of("A", f"a{number:03}", model, new=200))
    times: list[float] = []
    for number in range(_ASKED):
        at = 1.0 + 2.0 * number
        world.submit_at(at, of("B", f"b{number:02}", at=at))
    world.run()
    for number in range(_ASKED):
        name = f"b{number:02}"
        steps = [when for when, step in world.steps if name in [p.request_id for p in step.seqs]]
        times.append(max(steps) - (1.0 + 2.0 * number))
    assert all(job.ended for job in world.jobs.values()), "no tenant starves"
    return sorted(times)


@pytest.mark.parametrize("model", ["m", "other"])
def test_a_flood_slows_another_tenant_at_most_by_half_of_the_slice(model: str) -> None:
    alone, beside = loop_times(0, model), loop_times(64, model)
    assert beside[2] <= 1.7 * alone[2] + 0.07, "and the step that was under way"


def one(model: str, prompt: int, new: int, at: float = 0.0, slo: int = 0) -> tuple:
    """A request as `requests` of `slice_cases` has it."""
    return (model, prompt, new, at, 0, 0, 60, None, SLOS[slo], False)


@settings(max_examples=examples(100), deadline=None)
@given(
    drawn_requests, st.integers(0, 100), st.integers(2, 24), st.lists(st.sampled_from("AAAB")),
    st.integers(0, 40),
)  # fmt: skip
@example(  # a greedy prompt waits behind a late one, which is first in the line for memory
    [one("b", 129, 1, 0.5), one("a", 1, 1), one("a", 1, 1, 1.0), one("a", 1, 1, 0.5),
     one("c", 1, 9)], 0, 3, list("AAAA"), 0,
)  # fmt: skip
@example(  # a greedy decode waits for memory that one behind it holds, and cannot be paused
    [one("c", 25, 29, slo=1), one("b", 75, 36, slo=2), one("a", 1, 1, slo=2), one("b", 1, 24),
     one("b", 1, 32, slo=1)], 94, 3, list("AAABAAAA"), 11,
)  # fmt: skip
def test_tenants_change_nothing_about_every_request_ending_once(
    drawn: list, seed: int, slabs: int, tenants: list[str], host_blocks: int
) -> None:
    link = 1e6 if host_blocks else 0.0
    world = world_of(drawn, seed, slabs, 1, 0.0, 0.0, host_blocks=host_blocks, link=link)
    for (when, order, event), tenant in zip(list(world._heap), tenants, strict=False):
        if isinstance(event, Submitted):
            place = world._heap.index((when, order, event))
            owned = replace(event.request, tenant=tenant)
            world._heap[place] = (when, order, replace(event, request=owned))
            world.jobs[owned.id].request = owned
    world.run()
    assert all(job.ended for job in world.jobs.values())
    assert world.policy.running == 0


@settings(max_examples=examples(50), deadline=None)
@given(drawn_requests, st.integers(0, 100), st.integers(2, 24))
def test_one_tenant_by_any_name_is_served_as_without_names(
    drawn: list, seed: int, slabs: int
) -> None:
    plain, named = (world_of(drawn, seed, slabs, 1, 0.0, 0.0) for _ in range(2))
    named._heap = [
        (when, order, replace(event, request=replace(event.request, tenant="A")))
        if isinstance(event, Submitted) else (when, order, event)
        for when, order, event in named._heap
    ]  # fmt: skip
    plain.run()
    named.run()
    assert plain.steps == named.steps


def test_a_limited_prompt_does_not_hide_how_long_its_tokens_take() -> None:
    """Prompts of a greedy tenant get a few tokens in each step, fewer than the step has room for.
    What was not computed took no time."""
    world = SliceTestWorld(
        small_slice(400, max_batch=64), 0, [spec("m"), spec("other")], token_s=_TOKEN_S
    )
    world.activate()
    for number in range(4):
        long = replace(of("A", f"a{number}", at=0.1, new=4), prompt_len=160)
        world.submit_at(0.1, long)
    world.submit_at(0.0, of("B", "b", new=500))
    world.run()
    chunks = [part.tokens for _, step in world.steps for part in step.seqs if part.tokens > 1]
    assert min(chunks) < 16, "some were limited"
    assert world.policy.step_times()["m"].prefill_token_s == pytest.approx(_TOKEN_S, rel=0.2)
