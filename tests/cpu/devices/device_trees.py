"""`/proc` and `/sys` as machines show them, written out as files."""

from collections.abc import Sequence
from pathlib import Path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _meminfo(total_gib: int, available_gib: int) -> str:
    return (
        f"MemTotal:       {total_gib << 20} kB\nMemFree:        1024 kB\n"
        f"MemAvailable:   {available_gib << 20} kB\n"
    )


def _topology(siblings: Sequence[Sequence[int]], name: str = "core_cpus_list") -> dict[str, str]:
    return {
        f"devices/system/cpu/cpu{cpu}/topology/{name}": ",".join(map(str, group)) + "\n"
        for group in siblings
        for cpu in group
    }


XEON_FLAGS = (
    "fpu sse2 avx f16c fma avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx_vnni "
    "amx_bf16 avx512_fp16 amx_tile amx_int8"
)


def xeon(root: Path) -> tuple[Path, Path]:
    """Two sockets of 24 cores, two threads each: threads 0-23,48-71 and 24-47,72-95."""
    block = "processor\t: {}\nvendor_id\t: GenuineIntel\nmodel name\t: {}\nflags\t\t: {}\n"
    name = "Intel(R) Xeon(R) Platinum 8468"
    write(
        root / "proc",
        {
            "cpuinfo": "\n".join(block.format(cpu, name, XEON_FLAGS) for cpu in range(96)),
            "meminfo": _meminfo(512, 480),
            "self/cgroup": "0::/user.slice/session-3.scope\n",
        },
    )
    write(
        root / "sys",
        {
            "fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
            "fs/cgroup/user.slice/cpu.max": "max 100000\n",
            "fs/cgroup/user.slice/memory.max": "max\n",
            "fs/cgroup/user.slice/session-3.scope/memory.max": "max\n",
            "devices/system/node/node0/cpulist": "0-23,48-71\n",
            "devices/system/node/node1/cpulist": "24-47,72-95\n",
            "devices/system/node/node0/meminfo": f"Node 0 MemTotal:       {256 << 20} kB\n",
            "devices/system/node/node1/meminfo": f"Node 1 MemTotal:       {256 << 20} kB\n",
            **_topology([(cpu, cpu + 48) for cpu in range(48)]),
        },
    )
    return root / "proc", root / "sys"


def grace(root: Path) -> tuple[Path, Path]:
    """72 cores without SMT; nodes 1-8 are GPU memory without CPUs."""
    block = (
        "processor\t: {}\nBogoMIPS\t: 2000.00\n"
        "Features\t: fp asimd evtstrm aes atomics asimdhp asimddp sve sve2 svebf16 i8mm bf16\n"
        "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\n"
        "CPU part\t: 0xd4f\nCPU revision\t: 0\n"
    )
    write(
        root / "proc",
        {
            "cpuinfo": "\n".join(block.format(cpu) for cpu in range(72)),
            "meminfo": _meminfo(576, 560),
            "self/cgroup": "0::/\n",
        },
    )
    nodes = {f"devices/system/node/node{i}/cpulist": "\n" for i in range(1, 9)}
    write(
        root / "sys",
        {
            "fs/cgroup/cgroup.controllers": "cpu memory\n",
            "devices/system/node/node0/cpulist": "0-71\n",
            "devices/system/node/node0/meminfo": f"Node 0 MemTotal:  {480 << 20} kB\n",
            **nodes,
            **_topology([(cpu,) for cpu in range(72)], "thread_siblings_list"),
        },
    )
    return root / "proc", root / "sys"


def container_v2(root: Path) -> tuple[Path, Path]:
    """A pod on a large machine: 3.5 CPUs, 16 GiB of which 6 are used, 2 of those page cache."""
    proc, sys = xeon(root)
    write(proc, {"self/cgroup": "0::/\n"})
    write(
        sys,
        {
            "fs/cgroup/cpu.max": "350000 100000\n",
            "fs/cgroup/memory.max": f"{16 << 30}\n",
            "fs/cgroup/memory.current": f"{6 << 30}\n",
            "fs/cgroup/memory.stat": f"anon {4 << 30}\ninactive_file {2 << 30}\n",
        },
    )
    return proc, sys


def container_v1(root: Path) -> tuple[Path, Path]:
    """The same with the first version; its path is the host's, which a container does not see."""
    proc, sys = xeon(root)
    (sys / "fs" / "cgroup" / "cgroup.controllers").unlink()
    path = "/kubepods/burstable/podab12"
    write(proc, {"self/cgroup": f"9:memory:{path}\n4:cpu,cpuacct:{path}\n0::/\n"})
    write(
        sys,
        {
            "fs/cgroup/cpu/cpu.cfs_quota_us": "350000\n",
            "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "fs/cgroup/memory/memory.limit_in_bytes": f"{16 << 30}\n",
            "fs/cgroup/memory/memory.usage_in_bytes": f"{6 << 30}\n",
            "fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {2 << 30}\n",
        },
    )
    return proc, sys
