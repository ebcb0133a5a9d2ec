"""SLINFER's placing: memory and time are checked before anybody is placed, and nobody is preempted
who would not be in time elsewhere."""

from dataclasses import replace
from random import Random

from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c2cserve.core.actions import Activate, ResizeKv
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request, Slo
from c2cserve.policy.baselines.presets import SLINFER
from c2cserve.policy.baselines.slinfer.consolidation import Placer, footprint, resumed
from c2cserve.policy.baselines.slinfer.memory import MemoryBooks
from c2cserve.policy.cluster.quantify import StepTable
from c2cserve.policy.cluster.slice_load import PlacedRequest, SliceLoad

NO_CONSOLIDATION = replace(SLINFER, consolidate=False)
SPECS = {f"m{i}": ModelSpec(f"m{i}", 10_000 << i, 2, 16, 4096) for i in range(4)}
TABLE = StepTable(((1, 0.001), (4096, 0.4)), ((512, 1, 0.02), (512, 64, 0.08)))


def random_loads(random: Random) -> list[SliceLoad]:
    loads: list[SliceLoad] = []
    for number in range(random.randint(1, 3)):
        cpu = random.random() < 0.3
        slice_ = Slice(
            f"s{number}", "cpu" if cpu else "gpu", max_batch=8, max_active=3,
            gpu=None if cpu else GpuShare(f"g{number}", 1),
            hbm_bytes=random.choice((40_000, 120_000, 400_000)),
        )  # fmt: skip
        load = SliceLoad(slice_, profiled=dict.fromkeys(SPECS, TABLE))
        load.memory = MemoryBooks[Activate | ResizeKv](slice_.hbm_bytes)
        loads.append(load)
    return loads


def carry_out(
    loads: list[SliceLoad], request: Request, placer: Placer, now: float
) -> tuple[str, str] | None:
    """Slice and the model that was preempted there ("": none); None: nowhere."""
    spec = SPECS[request.model]
    before = {one.slice.id: len(one.active) for one in loads}
    placement = placer.place(request, spec, loads, now)
    if placement is None:
        return None
    load = next(one for one in loads if one.slice.id == placement.slice_id)
    assert load.memory is not None
    assert placer.computes(load, request, now, without=placement.preempt or ""), (
        "it would be late there"
    )
    if placement.preempt is not None:
        gone = load.active[placement.preempt]
        assert len(gone.jobs) < len(load.active[request.model].jobs), "only smaller batches leave"
        load.memory.down(footprint(load, gone))
        load.memory.freed(footprint(load, gone))
        for name in list(gone.jobs):
            load.remove(gone.spec.id, name)
        load.deactivate(gone.spec.id)
    if placement.activate:
        assert before[load.slice.id] < load.slice.max_active
        instance = load.activate(spec)
        needed = spec.weight_bytes + placement.kv_bytes
    else:
        instance = load.active[spec.id]
        needed = max(0, placement.kv_bytes - instance.kv_bytes)
    assert needed <= load.memory.free_bytes, "there is no memory for it"
    load.memory.up(needed, Activate(spec.id, load.slice.id))
    instance.kv_bytes = max(instance.kv_bytes, placement.kv_bytes)
    load.add(request)
    return load.slice.id, placement.preempt or ""


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 10**9), st.booleans())
@example(4194305, True)  # a pace that changes with who leaves
def test_who_is_placed_has_memory_and_time(seed: int, consolidate: bool) -> None:
    random = Random(seed)
    loads, now = random_loads(random), 0.0
    preset = SLINFER if consolidate else NO_CONSOLIDATION
    placer = Placer(preset, lambda model: 50.0)
    there: list[tuple[SliceLoad, str, str]] = []
    for number in range(random.randint(1, 30)):
        now += random.random() * 0.2
        there = [
            (load, model, name) for load, model, name in there
            if model in load.active and name in load.active[model].jobs
        ]  # fmt: skip
        if there and random.random() < 0.5:
            load, model, name = random.choice(there)
            load.first_token(model, name, 0.1)
            continue
        model = random.choice(sorted(SPECS))
        slo = Slo(random.choice((0.3, 2.0)), random.choice((0.05, 0.25)))
        request = Request(f"r{number}", model, random.randint(1, 900), 100, now, slo)
        placed = carry_out(loads, request, placer, now)
        if placed is not None:
            assert consolidate or not placed[1], "nobody is preempted without consolidation"
            load = next(one for one in loads if one.slice.id == placed[0])
            there.append((load, model, request.id))
    for load in loads:
        assert load.memory is not None
        used = sum(footprint(load, one) for one in load.active.values())
        assert used == load.memory.budget_bytes <= load.slice.hbm_bytes


@given(st.integers(1, 2000), st.integers(1, 500), st.integers(0, 600))
def test_a_request_that_moves_keeps_its_tokens(prompt: int, most: int, out: int) -> None:
    request = Request("r", "m0", prompt, most, 0.0, Slo(1.0, 0.1))
    moved = resumed(PlacedRequest(request, first_s=0.0, out=out))
    assert moved.prompt_len + moved.max_new_tokens == prompt + most
    assert moved.max_new_tokens >= 1
    assert moved.sent == moved.prompt_len - prompt
    assert moved.arrival_s == request.arrival_s
