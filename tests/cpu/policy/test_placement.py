"""Where a request goes: within memory, link and places, without harm to whoever has requests."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.policy.baselines.c2cserve.streaming import STREAMS_ONLY
from c2cserve.policy.cluster.link_and_memory import (
    LINK_AND_MEMORY,
    SWAP_TOKENS,
    LinkAndMemory,
    link_demand,
    stream_step_s,
    turns_bytes,
)
from c2cserve.policy.cluster.placement import in_time
from c2cserve.policy.cluster.placement import place as place_within
from c2cserve.policy.cluster.quantify import StepTable
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad

place = partial(place_within, budgets=LINK_AND_MEMORY)
SPECS = [ModelSpec(f"m{i}", 10 << i, 2, 16, 4096) for i in range(6)]
TABLE = StepTable(((1, 0.001), (4096, 0.1)), ((512, 1, 0.01), (512, 64, 0.05)))


def ask(name: str, model: ModelSpec, tpot_s: float = 0.1) -> Request:
    return Request(name, model.id, 100, 50, 0.0, Slo(2.0, tpot_s))


def slice_load(
    name: str, hbm_bytes: int, link_bytes_per_s: float, *, max_active: int = 4, keeps: bool = True
) -> SliceLoad:
    gpu = GpuShare(name, 100)
    slice_ = Slice(
        name, "gpu", kv_bytes=hbm_bytes or 1000, slab_bytes=1, max_batch=8, max_active=max_active,
        gpu=gpu, hbm_bytes=hbm_bytes, link_bytes_per_s=link_bytes_per_s,
    )  # fmt: skip
    load = SliceLoad(slice_, profiled={spec.id: TABLE for spec in SPECS})
    load.keeps = keeps and link_bytes_per_s > 0 and hbm_bytes > 0
    return load


def carry_out(load: SliceLoad, request: Request, placement: Placement, kv_bytes: float) -> None:
    spec = next(spec for spec in SPECS if spec.id == request.model)
    for name in placement.deactivate:
        assert load.deactivate(name), "it leaves, so it was there"
    if placement.activate:
        streams = load.keeps and not placement.keep
        step_s = stream_step_s(load, spec) if streams else 0.0
        load.activate(spec, streams=streams, stream_step_s=step_s)
    load.add(request, kv_bytes)


def fits(load: SliceLoad) -> bool:
    """Everybody's weights and KV, or, where models take shifts, the two largest."""
    free = load.slice.hbm_bytes - load.kv_bytes
    if not load.keeps:
        return load.weight_bytes <= free
    sizes = sorted(one.spec.weight_bytes for one in load.busy() if not one.streams)
    loads_s = sum(sizes) / load.slice.link_bytes_per_s
    return sum(sizes) <= free or (
        sum(sizes[-2:]) <= free and loads_s <= SWAP_TOKENS * load.work().tpot_s
    )


def demands(load: SliceLoad) -> int:
    return sum(link_demand(one.spec.weight_bytes, one.tpot_s) for one in load.busy() if one.streams)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 10**9))
def test_whoever_is_placed_fits_and_nobody_with_requests_leaves(seed: int) -> None:
    random = Random(seed)
    loads = {
        f"s{i}": slice_load(
            f"s{i}", random.choice((0, 200, 700)), random.choice((0.0, 1000.0, 6000.0)),
            max_active=random.randint(1, 4), keeps=random.random() < 0.8,
        )
        for i in range(random.randint(1, 3))
    }  # fmt: skip
    there: list[tuple[str, str, str]] = []
    for number in range(random.randint(1, 40)):
        if there and random.random() < 0.4:
            where, model, name = there.pop(random.randrange(len(there)))
            loads[where].remove(model, name)
            continue
        spec, kv_bytes = random.choice(SPECS), float(random.choice((0, 16, 64)))
        request = ask(f"r{number}", spec, random.choice((0.05, 0.2)))
        able = [load for load in loads.values() if load.requests < load.most_requests]
        placement = place(request, spec, kv_bytes, able, lambda name: (float(name[1:]),), 0.0)
        if placement is None:
            continue
        load = loads[placement.slice_id]
        before = {one.spec.id for one in load.busy()}
        alone = not demands(load)
        carry_out(load, request, placement, kv_bytes)
        there.append((placement.slice_id, spec.id, request.id))
        assert before <= {one.spec.id for one in load.busy()}
        assert len(load.active) <= load.slice.max_active
        assert len(load.active[spec.id].jobs) <= load.instance_limit
        assert load.keeps or not placement.keep
        if load.slice.hbm_bytes:
            assert fits(load)
        if load.keeps and placement.activate and not placement.keep:
            larger = spec.weight_bytes + kv_bytes > load.slice.hbm_bytes
            assert (larger and alone) or demands(load) <= load.slice.link_bytes_per_s


def with_a_neighbour(hbm_bytes: int = 200, link: float = 1000.0) -> SliceLoad:
    """A slice with 160 bytes of weights kept for somebody."""
    load = slice_load("s", hbm_bytes, link)
    carry_out(load, ask("n", SPECS[4], 0.5), Placement("s", activate=True, keep=True), 0.0)
    return load


def test_weights_that_do_not_fit_stream_while_the_link_carries_them() -> None:
    spec, load = SPECS[3], with_a_neighbour()  # 80 bytes per 0.5 s: 160 bytes/s
    first = place(ask("a", spec, 0.5), spec, 0.0, [load], lambda name: (), 0.0)
    assert first == Placement("s", activate=True)
    carry_out(load, ask("a", spec, 0.5), first, 0.0)
    assert load.weight_bytes == 160, "a stream takes none of the memory"
    other = ModelSpec("x", 180, 2, 16, 4096)  # 0.18 s more of 0.5 s: others would wait for it
    load.profiled["x"] = TABLE
    assert place(ask("b", other, 0.5), other, 0.0, [load], lambda name: (), 0.0) is None


def test_weights_that_fit_are_kept() -> None:
    spec, load = SPECS[3], slice_load("s", 100, 1e6)
    placement = place(ask("a", spec, 0.5), spec, 20.0, [load], lambda name: (), 0.0)
    assert placement == Placement("s", activate=True, keep=True)


def test_who_is_late_goes_where_nobody_else_becomes_late() -> None:
    spec, load = SPECS[0], with_a_neighbour()
    request = ask("a", spec)
    assert place(request, spec, 0.0, [load], lambda name: (), 9.0) is None
    late = place(request, spec, 0.0, [load], lambda name: (), 9.0, late=True)
    assert late == Placement("s", activate=True, keep=True)
    load.add(ask("m", SPECS[4], 0.01), 0.0)
    assert place(request, spec, 0.0, [load], lambda name: (), 9.0, late=True) is None


def prompts_on(load: SliceLoad, *prompts: tuple[int, float]) -> SliceLoad:
    """Give it requests of another model: (prompt tokens, TTFT target)."""
    load.activate(SPECS[0])
    for number, (tokens, ttft_s) in enumerate(prompts):
        load.add(Request(f"p{number}", "m0", tokens, 50, 0.0, Slo(ttft_s, 0.1)))
    return load


def test_a_prompt_waits_only_for_those_that_are_due_before_it() -> None:
    """A prompt of 4,096 tokens takes 0.1 s."""
    short = Request("r", "m1", 100, 50, 0.0, Slo(0.2, 0.1))
    urgent = prompts_on(slice_load("g", 100, 100.0), *[(4096, 0.1)] * 2)
    assert not in_time(urgent, short, 0.0, 1.0)
    assert in_time(prompts_on(slice_load("g", 100, 100.0), *[(4096, 9.0)] * 2), short, 0.0, 1.0)


def test_no_prompt_makes_a_later_one_late_that_would_be_in_time() -> None:
    """Two prompts of 0.1 s and their rounds take 0.26 s. The last one is late in any case."""
    first = Request("r", "m1", 4096, 50, 0.0, Slo(0.2, 0.1))
    cases = ((4096, 0.35, True), (4096, 0.23, False), (4096, 0.1, False), (8192, 0.25, True))
    for tokens, due_s, able in cases:
        load = prompts_on(slice_load("g", 100, 100.0), (tokens, due_s))
        assert in_time(load, first, 0.0, 1.0) == able, (tokens, due_s)


def test_of_idle_slices_the_one_whose_link_streams_least() -> None:
    loads = [slice_load(f"s{i}", 700, 5000.0) for i in range(4)]
    for load, link in zip(loads, "xxyy", strict=True):
        load.slice = replace(load.slice, link=link)
    carry_out(loads[0], ask("a", SPECS[0]), Placement("s0", activate=True), 0.0)
    placement = place(ask("b", SPECS[1]), SPECS[1], 0.0, loads, lambda name: (), 0.0)
    assert placement == Placement("s2", activate=True, keep=True)


def test_a_stream_that_paused_is_kept_if_others_have_taken_the_link() -> None:
    spec, other, load = SPECS[3], SPECS[2], slice_load("s", 700, 1000.0)
    carry_out(load, ask("a", spec), Placement("s", activate=True), 0.0)
    load.remove(spec.id, "a")
    carry_out(load, ask("b", other), Placement("s", activate=True), 0.0)
    again = place(ask("c", spec), spec, 0.0, [load], lambda name: (), 0.0)
    assert again == Placement("s", activate=True, keep=True, deactivate=(spec.id,))


def test_a_model_larger_than_the_memory_streams_alone() -> None:
    spec, other, load = SPECS[5], SPECS[0], slice_load("s", 200, 1000.0)
    carry_out(load, ask("b", other), Placement("s", activate=True), 0.0)
    assert place(ask("a", spec), spec, 0.0, [load], lambda name: (), 0.0) is None
    load.remove(other.id, "b")
    placement = place(ask("a", spec), spec, 0.0, [load], lambda name: (), 0.0)
    assert placement == Placement("s", activate=True)


@pytest.mark.parametrize("keeps", [False, True])
def test_unused_neighbours_make_room_for_what_a_batch_grows_by(keeps: bool) -> None:
    load = slice_load("s", 200, 1.0, keeps=keeps)
    carry_out(load, ask("a", SPECS[3]), Placement("s", activate=True, keep=True), 60.0)
    carry_out(load, ask("b", SPECS[1]), Placement("s", activate=True, keep=True), 0.0)
    load.remove(SPECS[1].id, "b")
    placement = place(ask("c", SPECS[3]), SPECS[3], 50.0, [load], lambda name: (), 0.0)
    gone = () if keeps else (SPECS[1].id,)  # where models take shifts, the slice sees to it
    assert placement == Placement("s", deactivate=gone)


def test_as_many_models_take_shifts_as_the_link_loads_in_time() -> None:
    """Each of 80 bytes, of which two fit at a time."""
    loads_s = 80 / 1000.0
    load, now = slice_load("s", 200, 1000.0, max_active=90), 0.0
    specs = [ModelSpec(f"x{i}", 80, 2, 16, 4096) for i in range(60)]
    load.profiled = {spec.id: StepTable(((1, 1e-4),), ((512, 1, 1e-4),)) for spec in specs}
    placed = 0
    for spec in specs:
        request = ask(spec.id, spec, 0.05)
        placement = place(request, spec, 1.0, [load], lambda name: (), now)
        if placement is None:
            break
        assert placement.keep
        load.activate(spec)
        load.add(request, 1.0)
        placed += 1
    assert placed == int(SWAP_TOKENS * 0.05 / loads_s)
    load.remove("x1", "x1")
    again = ask("n", specs[1], 0.05), specs[1], 1.0, [load], lambda name: (), 1.5
    assert place(*again) is not None
    for one in load.active.values():
        one.ready = False
    assert place(*again) is None, "too many wait for their first load already"


def test_a_model_that_runs_elsewhere_does_not_begin_to_swap() -> None:
    """40 and 40 bytes of weights are there; 40 more would make them swap."""
    load = slice_load("s1", 100, 1000.0)
    models = [ModelSpec(f"m{i}", 40, 2, 16, 4096) for i in range(3)]
    for spec in models:
        load.profiled[spec.id] = TABLE
    for spec in models[:2]:
        load.activate(spec)
        load.add(ask(spec.id, spec))
    request = ask("r", models[2])
    alone, second = (
        place(request, models[2], 0.0, [load], lambda name: (), 0.0, runs=runs)
        for runs in (False, True)
    )
    assert alone == Placement("s1", activate=True, keep=True)
    assert second is None


@pytest.mark.parametrize(("cached", "goes_to"), [(False, "s1"), (True, "s0")])
def test_a_second_instance_displaces_no_weights_while_the_first_is_in_time(
    cached: bool, goes_to: str
) -> None:
    """The first slice is busier than half of the targets. The other is idle: empty, or its memory
    holds what others will ask for again."""
    loads = [slice_load(f"s{i}", 100, 1000.0) for i in range(2)]
    loads[0].activate(SPECS[1])
    for number in range(8):
        loads[0].add(ask(f"more{number}", SPECS[1], 0.03))
    if cached:
        loads[1].activate(SPECS[3])
    request = ask("r", SPECS[1], 0.03)
    placement = place(request, SPECS[1], 10.0, loads, lambda name: (), 0.0, runs=True)
    assert placement is not None
    assert placement.slice_id == goes_to


def test_requests_that_take_turns_have_a_token_in_each_target() -> None:
    """A step of 10 ms, and exchanges of 10 ms: five times what is in memory, as far as the host
    reaches."""
    assert turns_bytes(100, 10**6, 1000.0, 10, 0.01, 0.1) == pytest.approx(500)
    assert turns_bytes(100, 300, 1000.0, 10, 0.01, 0.1) == 300, "all have copies there"
    assert turns_bytes(100, 120, 1000.0, 10, 0.01, 0.1) == 160, "half is for those that are away"
    assert turns_bytes(100, 10**6, 1000.0, 10, 0.2, 0.1) == 100, "steps are too slow for turns"
    assert turns_bytes(100, 10**6, 0.0, 10, 0.01, 0.1) == 100
    assert turns_bytes(100, 10**6, 1000.0, 10, float("inf"), 0.1) == 100, "not known yet"


@pytest.mark.parametrize(
    ("host_bytes", "budgets", "taken"),
    [(0, LINK_AND_MEMORY, 6), (10**4, LINK_AND_MEMORY, 10), (10**4, STREAMS_ONLY, 6)],
)
def test_a_slice_with_host_memory_gets_more_requests_than_its_memory_holds(
    host_bytes: int, budgets: LinkAndMemory, taken: int
) -> None:
    """Memory for six, where ten may go to one instance. Policies that do not rotate get no more."""
    load = slice_load("s", 100, 10**4)
    load.slice = replace(load.slice, host_kv_bytes=host_bytes)
    load.activate(SPECS[2])
    for number in range(20):
        request = Request(f"r{number}", SPECS[2].id, 100, 50, 0.0, Slo(60.0, 1.0))
        found = place_within(
            request, SPECS[2], 10.0, [load], lambda name: tuple[float, ...](), 0.0, budgets=budgets
        )
        if found is not None:
            carry_out(load, request, found, 10.0)
    assert load.requests == taken


def turning(kv_bytes: float) -> SliceLoad:
    """A slice of 200 bytes. One model with weights of 40 and so much KV takes turns there."""
    load = slice_load("s", 200, 70)
    load.slice = replace(load.slice, host_kv_bytes=100)
    load.activate(SPECS[2])
    for number in range(8):
        request = Request(f"r{number}", SPECS[2].id, 100, 50, 0.0, Slo(60.0, 1.0))
        load.add(request, kv_bytes / 8)
    return load


def joins(load: SliceLoad, model: ModelSpec, owed_bytes: int = 0) -> bool:
    request = Request("new", model.id, 100, 50, 0.0, Slo(60.0, 1.0))
    found = place(
        request, model, 1.0, [load], lambda name: tuple[float, ...](), 0.0, owed_bytes=owed_bytes
    )
    return found is not None


def test_requests_that_take_turns_do_not_keep_another_models_weights_out() -> None:
    """Weights of 40 and of 80 bytes leave 80, and the host has 50 for those that are away. The
    link is too slow for them to stream."""
    assert joins(turning(120.0), SPECS[3])
    assert not joins(turning(140.0), SPECS[3])


def test_turns_leave_room_for_weights_that_are_waited_for_or_idle_here() -> None:
    """Beside weights of 40 bytes there are 160, and 210 with turns. Beside 80 more there are 130
    with turns."""
    load = turning(180.0)
    assert joins(load, SPECS[2])
    assert not joins(load, SPECS[2], owed_bytes=80)
    assert joins(load, SPECS[2], owed_bytes=200), "they would not fit in any case"
    load.activate(SPECS[3])
    assert not joins(load, SPECS[2])
    assert joins(turning(150.0), SPECS[2], owed_bytes=80), "it needs no turns"
