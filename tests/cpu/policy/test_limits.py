"""Placing as simpler systems do it: fixed numbers of requests, or any slice."""

from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.baselines.presets import Limit
from c2cserve.policy.baselines.serverlessllm import limit, place_by_limits, scatter
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad

LIMITS = (Limit(10, 1, 3), Limit(20, 0, 2))
SMALL, LARGE, HUGE = (ModelSpec(f"m{size}", size, 2, 16, 4096) for size in (10, 20, 90))


def loads_of(kinds: list[bool], max_active: int = 2) -> list[SliceLoad]:
    """True: a CPU."""
    return [
        SliceLoad(
            Slice(
                f"s{i}", "cpu" if cpu else "gpu", max_batch=4, max_active=max_active,
                gpu=None if cpu else GpuShare(f"g{i}", 1),
            )
        )
        for i, cpu in enumerate(kinds)
    ]  # fmt: skip


def carry_out(loads: list[SliceLoad], request: Request, placement: Placement) -> None:
    load = next(load for load in loads if load.slice.id == placement.slice_id)
    for name in placement.deactivate:
        assert load.deactivate(name)
    if placement.activate:
        load.activate(next(m for m in (SMALL, LARGE, HUGE) if m.id == request.model))
    load.add(request)


def test_limits_go_by_size_and_the_last_holds_for_all_larger_models() -> None:
    cpu, gpu = loads_of([True, False])
    assert [limit(LIMITS, spec, gpu) for spec in (SMALL, LARGE, HUGE)] == [3, 2, 2]
    assert [limit(LIMITS, spec, cpu) for spec in (SMALL, LARGE, HUGE)] == [1, 0, 0]


@given(
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.lists(st.sampled_from([SMALL, LARGE]), max_size=20),
)
def test_instances_are_alone_and_within_their_limit(
    kinds: list[bool], asked: list[ModelSpec]
) -> None:
    loads = loads_of(kinds)
    for number, spec in enumerate(asked):
        request = Request(f"r{number}", spec.id, 10, 10, 0.0)
        able = [one for one in loads if limit(LIMITS, spec, one)]
        placement = place_by_limits(request, spec, able, LIMITS)
        full = [
            one for one in able
            if (spec.id in one.active and len(one.active[spec.id].jobs) < limit(LIMITS, spec, one))
            or not one.active
        ]  # fmt: skip
        assert (placement is None) == (not full), "it waits only while there is no room"
        if placement is not None:
            carry_out(loads, request, placement)
    for load in loads:
        assert len(load.active) <= 1
        for one in load.active.values():
            assert len(one.jobs) <= limit(LIMITS, one.spec, load)


@given(
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from([SMALL, LARGE, HUGE]), st.booleans()), max_size=40),
    st.integers(0, 99),
    st.booleans(),
)
def test_scatter_is_drawn_by_seed_and_keeps_to_places(
    kinds: list[bool], asked: list[tuple[ModelSpec, bool]], seed: int, share: bool
) -> None:
    loads = loads_of(kinds)
    for number, (spec, ends) in enumerate(asked):
        request = Request(f"r{number}", spec.id, 10, 10, 0.0)
        placement = scatter(request, loads, seed, share)
        assert placement == scatter(request, list(reversed(loads)), seed, share)
        if placement is None:
            continue
        carry_out(loads, request, placement)
        if ends:
            load = next(load for load in loads if load.slice.id == placement.slice_id)
            load.remove(spec.id, request.id)
    for load in loads:
        assert len(load.active) <= (load.slice.max_active if share else 1)
        assert all(len(one.jobs) <= load.instance_limit for one in load.active.values())
