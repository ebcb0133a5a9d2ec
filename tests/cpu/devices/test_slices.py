"""How cores become slices: by rule on known machines, and by property on any."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2cserve.core.machine import GpuShare, Machine, NumaNode, Slice
from c2cserve.devices.slices import (
    KV_BYTES_MAX,
    KV_BYTES_MIN,
    SLAB_BYTES,
    SlicePlanError,
    memory_beside_kv,
    plan_pool_bytes,
    plan_slices,
)

GIB = 1 << 30


def machine(cores_per_node: list[int], *, smt: int = 1, available_gib: int = 64) -> Machine:
    cores: list[tuple[int, ...]] = []
    nodes: list[NumaNode] = []
    total = sum(cores_per_node)
    for node, count in enumerate(cores_per_node):
        first = len(cores)
        own = [tuple(core + total * t for t in range(smt)) for core in range(first, first + count)]
        cores += own
        nodes.append(NumaNode(node, tuple(sorted(c for core in own for c in core)), 0))
    return Machine(
        cpu_name="test",
        cpus=tuple(sorted(cpu for core in cores for cpu in core)),
        memory_bytes=2 * available_gib * GIB,
        memory_available_bytes=available_gib * GIB,
        shm_bytes=available_gib * GIB,
        isa=(),
        numa=tuple(nodes),
        cores=tuple(cores),
        shm_free_bytes=available_gib * GIB // 2,
    )


@pytest.mark.parametrize(
    ("cores", "sizes"),
    [
        ([1], [1]),
        ([2], [2]),
        ([4], [4]),
        ([16], [16]),
        ([24, 24], [12] * 4),
        ([32], [16, 16]),
        ([72], [18] * 4),
        ([4, 4], [4, 4]),
        ([20, 4], [20, 4]),
    ],
)
def test_default_rule(cores: list[int], sizes: list[int]) -> None:
    slices = plan_slices(machine(cores))
    assert [len(s.cpus) for s in slices] == sizes
    assert [s.id for s in slices] == [f"cpu{i}" for i in range(len(slices))]


def test_a_prompt_of_512_words_and_its_template_are_one_step() -> None:
    assert all(s.max_step_tokens >= 512 + 64 for s in plan_slices(machine([24, 24])))


def test_one_thread_of_each_core() -> None:
    slices = plan_slices(machine([8], smt=2), 2)
    assert [s.cpus for s in slices] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_quota_caps_cores_over_all_nodes() -> None:
    limited = replace(machine([24, 24]), cpu_quota=16.5)
    slices = plan_slices(limited)
    assert [(s.numa, len(s.cpus)) for s in slices] == [(0, 8), (1, 8)]
    assert [len(s.cpus) for s in plan_slices(replace(limited, cpu_quota=0.5))] == [1]


def test_more_slices_than_cores_share_them() -> None:
    slices = plan_slices(machine([2]), count=4)
    assert [s.cpus for s in slices] == [(0,), (1,), (0,), (1,)]


def test_count_and_threads() -> None:
    assert [s.cpus for s in plan_slices(machine([8]), count=2, threads=3)] == [(0, 1, 2), (3, 4, 5)]
    assert [len(s.cpus) for s in plan_slices(machine([8, 6]), threads=4)] == [4, 4, 4]
    assert [s.numa for s in plan_slices(machine([8, 4]), count=3)] == [0, 0, 1]
    assert [(s.numa, len(s.cpus)) for s in plan_slices(machine([4, 8]), count=1)] == [(1, 8)]


def test_kv_bytes() -> None:
    by_rule = plan_slices(machine([2], available_gib=16))
    assert [s.kv_bytes for s in by_rule] == [2 * GIB]
    assert [s.kv_bytes for s in plan_slices(machine([2], available_gib=16), 2)] == [GIB, GIB]
    assert plan_slices(machine([1], available_gib=1000))[0].kv_bytes == KV_BYTES_MAX
    tiny = replace(machine([1]), memory_available_bytes=1)
    assert plan_slices(tiny)[0].kv_bytes == KV_BYTES_MIN
    assert plan_slices(machine([1]), kv_bytes=5 * SLAB_BYTES + 1)[0].kv_bytes == 5 * SLAB_BYTES


def test_pool_is_bounded_by_shared_memory() -> None:
    assert plan_pool_bytes(machine([1], available_gib=64)) == 32 * GIB
    roomy = replace(machine([1], available_gib=64), shm_free_bytes=1000 * GIB)
    assert plan_pool_bytes(roomy) == 48 * GIB


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"count": 0}, "at least one"),
        ({"threads": 0}, "at least one"),
        ({"threads": 9}, "largest NUMA node has 8"),
        ({"kv_bytes": 1}, "2097152"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, int], says: str) -> None:
    with pytest.raises(SlicePlanError, match=says):
        plan_slices(machine([8, 4]), **arguments)


@given(
    cores=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    smt=st.sampled_from([1, 2]),
    count=st.none() | st.integers(1, 30),
    threads=st.none() | st.integers(1, 8),
    quota=st.none() | st.floats(0.1, 200),
)
def test_any_machine(
    cores: list[int], smt: int, count: int | None, threads: int | None, quota: float | None
) -> None:
    any_machine = replace(machine(cores, smt=smt), cpu_quota=quota)
    try:
        slices = plan_slices(any_machine, count, threads)
    except SlicePlanError:
        assert threads is not None
        assert threads > 1
        return
    assert len(slices) == count if count is not None else len(slices) >= 1
    nodes = {node.id: set(node.cpus) for node in any_machine.numa}
    users = Counter(cpu for s in slices for cpu in s.cpus)
    for s in slices:
        assert s.cpus
        assert set(s.cpus) <= nodes[s.numa], "a slice stays on its node"
        assert threads is None or len(s.cpus) == threads
    if count is None:
        assert max(users.values()) == 1, "without being asked, slices share no core"
        if quota is not None:
            assert len(users) <= max(1, quota)


def test_the_pool_leaves_memory_for_kv() -> None:
    here = machine([1], available_gib=10)
    one = Slice("a", "cpu", kv_bytes=3 * GIB, host_kv_bytes=2 * GIB)
    assert memory_beside_kv(here, [one, replace(one, host_kv_bytes=0)]) == 2 * GIB
    in_hbm = replace(one, kind="gpu", gpu=GpuShare("GPU", 0))
    assert memory_beside_kv(here, [in_hbm]) == 8 * GIB
    with pytest.raises(SlicePlanError, match="--kv-bytes"):
        memory_beside_kv(here, [one, one])
    with pytest.raises(SlicePlanError, match="--host-kv-bytes"):
        memory_beside_kv(here, [replace(in_hbm, host_kv_bytes=10 * GIB)])
