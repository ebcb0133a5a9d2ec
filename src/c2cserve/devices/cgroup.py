"""Limits of a container or service manager: CPU time and memory, cgroup version 2 or 1."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from c2cserve.devices.procfs import read_int, read_text

_V1_NO_LIMIT = 1 << 60
"""Version 1 shows "no limit" as the largest page-aligned integer."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The limits of a cgroup. None: no limit. `memory_free_bytes` counts reclaimable page cache as
    free."""

    cpus: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None


def read_limits(proc: Path, sys: Path) -> CgroupLimits:
    """Return the tightest limits on this process's cgroup and its ancestors."""
    root = sys / "fs" / "cgroup"
    unified = (root / "cgroup.controllers").is_file()
    own = dict(_own_groups(proc))
    if unified:
        groups = list(_upwards(root, own.get("", "/")))
        cpus = [_cpus_v2(group) for group in groups]
        memory = [_memory_v2(group) for group in groups]
    else:
        cpus = [_cpus_v1(g) for g in _upwards(root / "cpu", own.get("cpu", "/"))]
        memory = [_memory_v1(g) for g in _upwards(root / "memory", own.get("memory", "/"))]
    bounded = [pair for pair in memory if pair is not None]
    return CgroupLimits(
        cpus=min((value for value in cpus if value is not None), default=None),
        memory_bytes=min((limit for limit, _ in bounded), default=None),
        memory_free_bytes=min((max(0, limit - used) for limit, used in bounded), default=None),
    )


def _own_groups(proc: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller, path) of this process's groups; version 2 has the controller ""."""
    for line in (read_text(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        for controller in controllers.split(","):
            yield controller, path


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield the group's directory and its ancestors up to the mount. In a container the path may be
    the host's and not exist below the mount; the mount is the container's own group then."""
    group = root / path.lstrip("/")
    while group != root:
        if group.is_dir() and ".." not in group.parts:
            yield group
        group = group.parent
    yield root


def _cpus_v2(group: Path) -> float | None:
    quota, _, period = (read_text(group / "cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _cpus_v1(group: Path) -> float | None:
    quota = read_int(group / "cpu.cfs_quota_us")
    period = read_int(group / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _memory_v2(group: Path) -> tuple[int, int] | None:
    limit = read_int(group / "memory.max")
    if limit is None:
        return None
    used = (read_int(group / "memory.current") or 0) - _reclaimable(group, "inactive_file")
    return limit, used


def _memory_v1(group: Path) -> tuple[int, int] | None:
    limit = read_int(group / "memory.limit_in_bytes")
    if limit is None or limit >= _V1_NO_LIMIT:
        return None
    used = read_int(group / "memory.usage_in_bytes") or 0
    return limit, used - _reclaimable(group, "total_inactive_file")


def _reclaimable(group: Path, key: str) -> int:
    for line in (read_text(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
