"""How GPUs become slices: whole, partitioned, MIG instances, and what does not fit."""

from dataclasses import replace

import pytest

from c2cserve.core.machine import Gpu, GpuShare, Machine, NumaNode, Slice, most_active
from c2cserve.devices.gpu_slices import SLAB_BYTES, plan_gpu_slices, visible_gpus
from c2cserve.devices.plan import SliceWishes, plan_all
from c2cserve.devices.slices import SlicePlanError

GIB = 1 << 30
H200 = [
    Gpu(i, f"GPU-{i}{i}", "NVIDIA H200", 141 * GIB, 132, memory_free_bytes=140 * GIB)
    for i in range(4)
]
MIG = [
    Gpu(1, "MIG-aa", "NVIDIA H200", 70 * GIB, 60, mig=True, memory_free_bytes=69 * GIB),
    Gpu(1, "MIG-bb", "NVIDIA H200", 16 * GIB, 16, mig=True, memory_free_bytes=16 * GIB),
]


def machine(*gpus: Gpu) -> Machine:
    cpus = tuple(range(8))
    return Machine(
        "test", cpus, 64 * GIB, 64 * GIB, 64 * GIB, (), (NumaNode(0, cpus, 0),), gpus,
        cores=tuple((cpu,) for cpu in cpus), shm_free_bytes=64 * GIB,
    )  # fmt: skip


def test_one_slice_per_gpu_with_what_is_free_but_a_reserve() -> None:
    first, second = plan_gpu_slices(machine(*H200[:2]))
    assert (first.id, first.kind, second.id) == ("gpu0", "gpu", "gpu1")
    assert first.gpu == GpuShare("GPU-00", 132)
    assert first.kv_bytes == first.hbm_bytes == 130 * GIB
    assert (first.link, second.link) == ("gpu0.h2d", "gpu1.h2d")
    assert first.cpus == tuple(range(8))
    assert first.max_step_tokens > 4096
    assert first.max_active == most_active("gpu")


def test_memory_others_have_taken_is_not_planned_with() -> None:
    taken = replace(H200[0], memory_free_bytes=26 * GIB)
    assert plan_gpu_slices(machine(taken))[0].kv_bytes == 39 * GIB // 2


def test_mig_instances_have_their_own_memory() -> None:
    slices = plan_gpu_slices(machine(H200[0], *MIG))
    assert [(s.id, s.kind) for s in slices] == [("gpu0", "gpu"), ("mig1", "mig"), ("mig2", "mig")]
    assert slices[2].gpu == GpuShare("MIG-bb", 16)
    assert slices[2].kv_bytes == 12 * GIB
    assert slices[1].link == slices[2].link, "of the GPU they are parts of"
    assert slices[2].max_step_tokens < slices[0].max_step_tokens


def test_partitions_share_memory_alike() -> None:
    wishes = SliceWishes(gpu_slices="16x7", gpu_profile="assumed")
    slices = plan_all(machine(*H200[:2]), wishes)
    assert [s.id for s in slices] == [f"gpu{g}.{p}" for g in range(2) for p in range(7)]
    assert {s.kind for s in slices} == {"green"}
    assert slices[3].gpu == GpuShare("GPU-00", 16, 3, 7, "assumed")
    assert sum(s.kv_bytes for s in slices[:7]) <= 130 * GIB
    assert all(s.kv_bytes % SLAB_BYTES == 0 for s in slices)


def test_gpu_slices_where_there_is_one_and_cpu_slices_instead_or_besides() -> None:
    alone = SliceWishes(gpu_slices="none")
    for slices in (plan_all(machine(), SliceWishes()), plan_all(machine(H200[0]), alone)):
        assert {s.kind for s in slices} == {"cpu"}
    for wishes in (SliceWishes(), SliceWishes(gpu_slices="whole")):
        assert [s.kind for s in plan_all(machine(H200[0]), wishes)] == ["gpu"]
    both = plan_all(machine(H200[0]), SliceWishes(cpu_slices=2, gpu_slices="whole"))
    assert [s.id for s in both] == ["gpu0", "cpu0", "cpu1"]


def linked(*gpus: Gpu) -> Machine:
    """All read each other's memory."""
    names = [gpu.uuid for gpu in gpus]
    return machine(*(replace(g, readable=tuple(n for n in names if n != g.uuid)) for g in gpus))


def test_gpus_without_slices_lend_their_memory() -> None:
    wishes = SliceWishes(gpu_slices="16x2@0,2", gpu_peer_bytes=60 * GIB)
    slices = plan_all(linked(*H200), wishes)
    assert [s.id for s in slices] == ["gpu0.0", "gpu0.1", "gpu2.0", "gpu2.1"]
    for one in slices:
        assert one.gpu is not None
        assert (one.gpu.lenders, one.gpu.lent_bytes) == (("GPU-11", "GPU-33"), 60 * GIB)
    alone = plan_all(linked(*H200), SliceWishes(gpu_slices="whole@1"))
    assert [s.id for s in alone] == ["gpu1"]
    assert alone[0].gpu == GpuShare("GPU-11", 132)


def test_gpus_with_slices_lend_their_links_to_those_whose_memory_they_reach() -> None:
    gpus = [replace(gpu, readable=()) if gpu.id == 3 else gpu for gpu in linked(*H200).gpus]
    for relays, names in ((False, []), (True, ["GPU-00", "GPU-22"])):
        wishes = SliceWishes(gpu_slices="whole@0,2,3", gpu_relays=relays)
        slices = plan_all(machine(*gpus), wishes)
        found = [sorted(one.gpu.neighbours) for one in slices if one.gpu is not None]
        others = [[name for name in names if name != own] for own in ("GPU-00", "GPU-22", "GPU-33")]
        assert found == others, "GPU 3 reaches no memory, so it lends nothing"


@pytest.mark.parametrize(
    ("gpus", "slices", "lent", "says"),
    [
        (H200[:2], "whole", GIB, "all have slices of their own.*whole@0"),
        (H200[:2], "none", GIB, "there are none"),
        (H200, "whole@0,1", 70 * GIB, "GPU 2 can lend .* to each of 2 GPUs"),
        ([H200[0], *MIG], "whole@0", GIB, "no GPU can lend"),
        ([*MIG, H200[0]], "whole@0", GIB, "can read the memory of no GPU"),
        (H200, "whole@4", 0, "no GPU 4: 4 were found"),
        (H200, "whole@", 0, "by number"),
        (H200, "whole@a", 0, "by number"),
    ],
)
def test_loans_that_no_gpu_can_give_are_refused(
    gpus: list[Gpu], slices: str, lent: int, says: str
) -> None:
    blind = [replace(gpu, readable=()) if gpu.mig else gpu for gpu in linked(*gpus).gpus]
    with pytest.raises(SlicePlanError, match=says):
        plan_all(machine(*blind), SliceWishes(gpu_slices=slices, gpu_peer_bytes=lent))


def test_gpu_slices_have_host_memory_for_kv_where_there_is_some() -> None:
    roomy = replace(machine(*H200[:2]), memory_available_bytes=512 * GIB)
    both = SliceWishes(cpu_slices=1, gpu_slices="whole")

    def sizes(wishes: SliceWishes, pool_bytes: int | None = None) -> list[int]:
        return [one.host_kv_bytes for one in plan_all(roomy, wishes, pool_bytes)]

    assert sizes(both) == [4 * GIB, 4 * GIB, 0], "KV of CPU slices is in host memory already"
    assert sizes(both, 496 * GIB) == [2 * GIB, 2 * GIB, 0]
    assert sizes(both, 512 * GIB) == [0, 0, 0]
    assert sizes(replace(both, gpu_kv_bytes=GIB)) == [GIB, GIB, 0], "as much as the arena"
    assert sizes(replace(both, host_kv_bytes=0)) == [0, 0, 0]
    assert sizes(replace(both, host_kv_bytes=GIB)) == [GIB, GIB, GIB]
    with_rule = plan_all(machine(*H200[:2]), SliceWishes())
    assert [one.host_kv_bytes for one in with_rule] == [2 * GIB, 2 * GIB]


@pytest.mark.parametrize(
    ("gpus", "wishes", "says"),
    [
        ([], {"gpu_slices": "16x7"}, "no GPU"),
        ([], {"gpu_slices": "whole"}, "no GPU"),
        (H200, {"gpu_slices": "7"}, "SMs x slices"),
        (H200, {"gpu_slices": "12x2"}, "multiple of 8"),
        (H200, {"gpu_slices": "16x0"}, "multiple of 8"),
        (H200, {"gpu_slices": "32x5"}, "132 SMs: 5 slices of 32 need 160"),
        (MIG, {"gpu_slices": "8x2"}, "MIG mode"),
        (H200, {"gpu_slices": "whole", "gpu_kv_bytes": 150 * GIB}, "KV arenas"),
        (H200, {"gpu_slices": "16x7", "gpu_kv_bytes": 30 * GIB}, "7 KV arenas"),
        (H200, {"gpu_slices": "whole", "gpu_kv_bytes": 1}, "are the least"),
        (H200, {"gpu_slices": "whole", "host_kv_bytes": 1 << 50}, "for paused requests of 4"),
    ],
)
def test_what_does_not_fit_is_refused(
    gpus: list[Gpu], wishes: dict[str, object], says: str
) -> None:
    with pytest.raises(SlicePlanError, match=says):
        plan_all(machine(*gpus), SliceWishes(**wishes))


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-33, 1", [3, 1]),
        ("1,9,2", [1]),
        ("1,1", [1]),
        ("-1", []),
    ],
)
def test_what_cuda_may_see(variable: str | None, seen: list[int]) -> None:
    assert [gpu.id for gpu in visible_gpus(H200, variable)] == seen


def test_a_mig_instance_is_seen_by_its_name() -> None:
    assert visible_gpus([H200[0], *MIG], "MIG-bb") == (MIG[1],)


def test_a_slice_is_of_a_gpu_or_of_cpus() -> None:
    with pytest.raises(ValueError, match="kind gpu"):
        Slice("x", "gpu")
    with pytest.raises(ValueError, match="kind cpu"):
        Slice("x", "cpu", gpu=GpuShare("GPU-0", 132))
