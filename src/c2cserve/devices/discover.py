"""This machine as `core.Machine`: the resources that the process may use."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from c2cserve.core.machine import Gpu, Machine, NumaNode
from c2cserve.devices.cgroup import CgroupLimits, read_limits
from c2cserve.devices.cpu import group_cores, name_and_isa
from c2cserve.devices.procfs import parse_cpu_list, parse_fields, read_text


def discover(
    *,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    shm: Path = Path("/dev/shm"),
    cpus: Iterable[int] | None = None,
    gpus: tuple[Gpu, ...] = (),
) -> Machine:
    """Return the CPUs, memory, NUMA nodes and shared memory of this machine.

    `cpus` are the hardware threads this process may run on (default: its affinity). `gpus` come
    from `gpus.find_gpus`, apart because asking a driver takes time and may fail. Memory is the
    tighter of the machine's and the cgroup's.
    """
    allowed = tuple(sorted(os.sched_getaffinity(0) if cpus is None else cpus))
    name, isa = name_and_isa(proc)
    limits = read_limits(proc, sys)
    total, available = _memory(proc, limits)
    shm_bytes, shm_free_bytes = _file_system(shm)
    return Machine(
        cpu_name=name,
        cpus=allowed,
        memory_bytes=total,
        memory_available_bytes=available,
        shm_bytes=shm_bytes,
        isa=isa,
        numa=_numa_nodes(sys, allowed, total),
        gpus=gpus,
        cores=group_cores(sys, allowed),
        cpu_quota=limits.cpus,
        shm_free_bytes=shm_free_bytes,
    )


def _memory(proc: Path, limits: CgroupLimits) -> tuple[int, int]:
    """Return total and available bytes."""
    fields = parse_fields(read_text(proc / "meminfo") or "")
    total = _kib(fields, "MemTotal")
    available = _kib(fields, "MemAvailable")
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
    if limits.memory_free_bytes is not None:
        available = min(available, limits.memory_free_bytes)
    return total, available


def _kib(fields: dict[str, str], key: str) -> int:
    return int(fields.get(key, "0 kB").split()[0]) << 10


def _file_system(path: Path) -> tuple[int, int]:
    """Return size and free bytes of a file system; zeros if there is none."""
    try:
        stat = os.statvfs(path)
    except FileNotFoundError:
        return 0, 0
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _numa_nodes(sys: Path, cpus: Collection[int], memory_bytes: int) -> tuple[NumaNode, ...]:
    """Return the nodes with a CPU that this process may use. (Others are GPU memory on
    superchips.)"""
    allowed = set(cpus)
    nodes: list[NumaNode] = []
    root = sys / "devices" / "system" / "node"
    for directory in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        listed = parse_cpu_list(read_text(directory / "cpulist") or "")
        own = tuple(cpu for cpu in listed if cpu in allowed)
        if own:
            nodes.append(NumaNode(int(directory.name[4:]), own, _node_memory(directory)))
    if not nodes:
        return (NumaNode(0, tuple(sorted(allowed)), memory_bytes),)
    return tuple(nodes)


def _node_memory(directory: Path) -> int:
    for line in (read_text(directory / "meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.endswith("MemTotal"):
            return int(value.split()[0]) << 10
    return 0
