"""Discovery from recorded `/proc` and `/sys` trees."""

import os
from pathlib import Path

from device_trees import container_v1, container_v2, grace, write, xeon

from c2cserve.core.machine import Machine
from c2cserve.devices.discover import discover
from c2cserve.devices.procfs import format_cpu_list, parse_cpu_list

GIB = 1 << 30


def look(trees: tuple[Path, Path], cpus: range) -> Machine:
    proc, sys = trees
    return discover(proc=proc, sys=sys, shm=proc, cpus=cpus)


def test_two_sockets_with_smt(tmp_path: Path) -> None:
    machine = look(xeon(tmp_path), range(96))
    assert machine.cpu_name == "Intel(R) Xeon(R) Platinum 8468"
    assert {"avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"} <= set(machine.isa)
    assert "sse2" not in machine.isa
    assert [(node.id, len(node.cpus)) for node in machine.numa] == [(0, 48), (1, 48)]
    assert machine.numa[0].memory_bytes == 256 * GIB
    assert len(machine.cores) == 48
    assert machine.cores[0] == (0, 48)
    assert machine.cpu_quota is None
    assert (machine.memory_bytes, machine.memory_available_bytes) == (512 * GIB, 480 * GIB)


def test_affinity_hides_cores_and_nodes(tmp_path: Path) -> None:
    machine = look(xeon(tmp_path), range(20, 24))
    assert machine.cpus == (20, 21, 22, 23)
    assert machine.cores == ((20,), (21,), (22,), (23,))
    assert [node.id for node in machine.numa] == [0]


def test_container_version_2(tmp_path: Path) -> None:
    machine = look(container_v2(tmp_path), range(96))
    assert machine.cpu_quota == 3.5
    assert machine.memory_bytes == 16 * GIB
    assert machine.memory_available_bytes == 12 * GIB, "page cache can be reclaimed"


def test_container_version_1(tmp_path: Path) -> None:
    machine = look(container_v1(tmp_path), range(96))
    assert machine.cpu_quota == 3.5
    assert machine.memory_bytes == 16 * GIB
    assert machine.memory_available_bytes == 12 * GIB


def test_an_ancestor_may_be_the_tightest(tmp_path: Path) -> None:
    proc, sys = xeon(tmp_path)
    write(
        sys,
        {
            "fs/cgroup/user.slice/cpu.max": "200000 100000\n",
            "fs/cgroup/user.slice/memory.max": f"{8 * GIB}\n",
            "fs/cgroup/user.slice/session-3.scope/cpu.max": "800000 100000\n",
            "fs/cgroup/user.slice/session-3.scope/memory.max": f"{32 * GIB}\n",
        },
    )
    machine = look((proc, sys), range(96))
    assert machine.cpu_quota == 2.0
    assert machine.memory_bytes == 8 * GIB


def test_version_1_without_limits(tmp_path: Path) -> None:
    proc, sys = container_v1(tmp_path)
    write(
        sys,
        {
            "fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    machine = look((proc, sys), range(96))
    assert machine.cpu_quota is None
    assert machine.memory_bytes == 512 * GIB


def test_grace(tmp_path: Path) -> None:
    machine = look(grace(tmp_path), range(72))
    assert machine.cpu_name == "Arm Neoverse V2"
    assert {"asimd", "sve", "sve2", "bf16", "i8mm"} <= set(machine.isa)
    assert [node.id for node in machine.numa] == [0], "GPU memory is not a node to compute on"
    assert len(machine.cores) == 72


def test_unknown_arm_part_is_named_by_its_numbers(tmp_path: Path) -> None:
    proc, sys = grace(tmp_path)
    write(proc, {"cpuinfo": "Features : asimd\nCPU implementer : 0x99\nCPU part : 0x123\n"})
    assert look((proc, sys), range(1)).cpu_name == "unknown CPU (implementer 0x99, part 0x123)"


def test_a_machine_that_shows_nothing_still_has_its_cpus(tmp_path: Path) -> None:
    machine = discover(proc=tmp_path, sys=tmp_path, shm=tmp_path / "none", cpus=(2, 3))
    assert machine.cores == ((2,), (3,))
    assert machine.numa[0].cpus == (2, 3)
    assert (machine.memory_bytes, machine.shm_bytes, machine.shm_free_bytes) == (0, 0, 0)


def test_this_machine() -> None:
    machine = discover()
    assert set(machine.cpus) == os.sched_getaffinity(0)
    assert 0 < machine.memory_available_bytes <= machine.memory_bytes
    assert sorted(cpu for core in machine.cores for cpu in core) == list(machine.cpus)


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("") == ()
    assert format_cpu_list((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"
    assert format_cpu_list(()) == ""
