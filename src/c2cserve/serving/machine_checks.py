"""The checks of `c2cserve doctor`. Each tests one thing and, if it is wrong, says how to fix it."""

import errno
import os
import platform
import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from c2cserve import __version__
from c2cserve.core.machine import Gpu, Machine, Slice
from c2cserve.devices.discover import discover
from c2cserve.devices.gpus import GpuProblem, find_nvml
from c2cserve.devices.links import measure_host_read
from c2cserve.devices.numa import reader_nodes, show_nodes, with_nodes
from c2cserve.devices.plan import SliceWishes, plan_all
from c2cserve.devices.slices import (
    CORES_FOR_MANY,
    SlicePlanError,
    memory_beside_kv,
    plan_pool_bytes,
)
from c2cserve.devices.topology import find_gpu_nodes, find_links, show_links
from c2cserve.engine.gpu.requirements import CPUS_INSTEAD, obstacles, usable_gpus
from c2cserve.sim import compiled
from c2cserve.terminal.output import show_bytes

_LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "starlette", "uvicorn",
    "msgspec", "numpy",
)  # fmt: skip
_FILES_MIN = 4096
"""Every connection takes one file; every worker maps two per model."""
_MAPS_MIN = 65530
_KERNEL_MIN = (5, 14)
_SHM_MIN_BYTES = 256 << 20
_UNITS = {
    "amx": "AMX tiles",
    "avx512_bf16": "AVX-512's bf16 instructions",
    "avx512": "AVX-512, widened to float32",
    "avx2": "AVX2, widened to float32",
    "generic": "portable vectors, widened to float32",
}
"""What multiplies weights in bf16, by the kernels' level (docs/cpu_kernels.md)."""
_SHM_SHARE_MIN = 0.25


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Serving works, but not as it could."""
    FAIL = "fail"
    """Serving does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    topic: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    version: str
    machine: Machine
    findings: tuple[Finding, ...]
    slices: tuple[Slice, ...]
    pool_bytes: int

    @property
    def failed(self) -> bool:
        return any(finding.level is Level.FAIL for finding in self.findings)


def diagnose(host: str, port: int, pool_dir: Path) -> Diagnosis:
    """Check this machine; takes about a second."""
    machine = discover(shm=pool_dir)
    findings: list[Finding] = []
    try:
        machine = replace(machine, gpus=usable_gpus())
    except GpuProblem as problem:
        findings.append(Finding(Level.WARN, "GPUs", f"the driver fails: {problem}", "nvidia-smi"))
    host_read = measure_host_read(machine)
    links, groups = find_links(find_nvml(), machine.gpus, host_read)
    machine = replace(machine, links=(host_read, *links), groups=groups)
    slices, plan = check_slices(machine)
    slices = with_nodes(slices, find_gpu_nodes(find_nvml(), machine.gpus))
    checks = (
        check_system(), check_cpu(machine), check_numa(machine, slices), check_kernels(),
        check_memory(machine), check_shared_memory(machine, pool_dir), plan, check_gpus(machine),
        check_limits(machine), check_port(host, port), check_libraries(),
        check_simulator(),
    )  # fmt: skip
    findings += [finding for check in checks for finding in check]
    pool_bytes = min(plan_pool_bytes(machine), memory_beside_kv(machine, slices)) if slices else 0
    return Diagnosis(__version__, machine, tuple(findings), slices, pool_bytes)


def check_system() -> Iterator[Finding]:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    text = f"c2cserve {__version__}, Python {platform.python_version()}, Linux {release}"
    if numbers < _KERNEL_MIN:
        wanted = ".".join(map(str, _KERNEL_MIN))
        yield Finding(Level.WARN, "system", text, f"Linux {wanted} or newer maps weights faster")
    else:
        yield Finding(Level.OK, "system", text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def check_cpu(machine: Machine) -> Iterator[Finding]:
    threads, cores, nodes = len(machine.cpus), len(machine.cores), len(machine.numa)
    text = f"{machine.cpu_name}: {_count(cores, 'core')}, {_count(threads, 'thread')},"
    text += f" {_count(nodes, 'NUMA node')}"
    if machine.cpu_quota is not None:
        text += f", of which a cgroup allows {machine.cpu_quota:g} CPUs of time"
    if machine.cpu_quota is not None and machine.cpu_quota < 1:
        yield Finding(Level.WARN, "CPU", text, "raise the container's CPU limit to at least 1")
    else:
        yield Finding(Level.OK, "CPU", text)
    sets = ", ".join(machine.isa) or "none that c2cserve has kernels for"
    yield Finding(Level.OK, "instructions", sets)
    for link in machine.links[:1]:
        rate = f"{link.bytes_per_s / 1e9:.1f}"
        text = (
            f"{rate} GB/s read by all cores: for one request, a dense model of 1 GB decodes {rate}"
            " tokens/s at most, one of 10 GB a tenth of that"
        )
        if (load := os.getloadavg()[0]) > threads / 2:
            text += f". Other programs were running (load {load:.1f}): an idle machine reads faster"
        yield Finding(Level.OK, "memory link", text)


def check_numa(machine: Machine, slices: Sequence[Slice]) -> Iterator[Finding]:
    """Say where the pool's segments would lie, and draw the nodes if there are several."""
    text = show_nodes(machine, reader_nodes(machine, slices))
    for node in machine.numa if len(machine.numa) > 1 else ():
        names = [one.id for one in slices if one.numa == node.id]
        read = f", read by {', '.join(names)}" if names else ""
        text += f"\nnode {node.id}: {len(node.cpus)} CPUs, {show_bytes(node.memory_bytes)}{read}"
    yield Finding(Level.OK, "NUMA", text)


def check_kernels() -> Iterator[Finding]:
    from c2cserve.kernels import native
    from c2cserve.kernels.native import KernelsMissing, chosen_isa, load_library

    try:
        isa = chosen_isa()
        load_library(isa)
    except (KernelsMissing, ValueError, OSError) as error:
        fix = "python -m c2cserve.kernels.build (needs a C++17 compiler)"
        yield Finding(Level.FAIL, "kernels", str(error), fix)
        return
    asked = os.environ.get("C2CSERVE_CPU_ISA")
    why = f"chosen of {', '.join(native.ISAS)} for this CPU"
    if asked:
        why = "as asked for" if asked == isa else f"the best that it has up to {asked}"
    text = f"{isa}, {why}; bf16 weights meet {_UNITS[isa]}"
    if asked in (None, "", "amx") and native.has_tiles() and not native.tiles_granted():
        text += "; AMX tiles are not used: the system refuses them to this process"
    elif not asked and "avx512_bf16" in native.cpu_flags() and isa == "avx512":
        text += "; this CPU's bf16 instructions are slower than that"
    yield Finding(Level.OK, "kernels", text)


def check_memory(machine: Machine) -> Iterator[Finding]:
    available = show_bytes(machine.memory_available_bytes)
    text = f"{available} available of {show_bytes(machine.memory_bytes)}"
    if machine.memory_available_bytes < 1 << 30:
        yield Finding(Level.WARN, "memory", text, "free some: weights and KV caches live there")
    else:
        yield Finding(Level.OK, "memory", text)


def check_shared_memory(machine: Machine, pool_dir: Path) -> Iterator[Finding]:
    topic = "shared memory"
    if machine.shm_bytes == 0:
        fix = "mount a tmpfs there, or name another with --pool-dir"
        yield Finding(Level.FAIL, topic, f"{pool_dir} does not exist", fix)
        return
    if not os.access(pool_dir, os.W_OK):
        yield Finding(Level.FAIL, topic, f"{pool_dir} is not writable", f"chmod 1777 {pool_dir}")
        return
    text = f"{show_bytes(machine.shm_free_bytes)} free of {show_bytes(machine.shm_bytes)}"
    text += f" at {pool_dir}"
    small = machine.shm_free_bytes < _SHM_SHARE_MIN * machine.memory_available_bytes
    fix = (
        "the weights of all models in the pool must fit: docker run --shm-size,"
        f" or mount -o remount,size=90% {pool_dir}"
    )
    if machine.shm_free_bytes < _SHM_MIN_BYTES:
        yield Finding(Level.FAIL, topic, text, fix)
    elif small:
        yield Finding(Level.WARN, topic, text, fix)
    else:
        yield Finding(Level.OK, topic, text)


def check_slices(machine: Machine) -> tuple[tuple[Slice, ...], tuple[Finding, ...]]:
    try:
        slices = plan_all(machine, SliceWishes())
        memory_beside_kv(machine, slices)
    except SlicePlanError as error:
        return (), (Finding(Level.FAIL, "slices", str(error)),)
    sizes = sorted({len(one.cpus) for one in slices})
    cores = " or ".join(map(str, sizes))
    text = (
        f"{len(slices)} of {cores} core{'s' * (sizes != [1])}: about one per 16 cores, none across"
        " NUMA nodes, one thread of each core. A request has the cores of one slice"
    )
    total = sum(len(one.cpus) for one in slices)
    if total >= 2 * CORES_FOR_MANY:
        text += (
            f"; with many models in use at once serve --slices {total // CORES_FOR_MANY}"
            " gives more tokens, each request slower"
        )
    if machine.gpus:
        text = f"{len(slices)}: one per GPU or MIG instance; serve --slices adds CPU slices"
    return slices, (Finding(Level.OK, "slices", text),)


def check_gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        hidden = Path("/proc/driver/nvidia/version").exists() and find_nvml() is None
        if hidden:
            fix = "pip install '.[gpu]' in the checkout"
            yield Finding(Level.WARN, "GPUs", "a driver is there, its Python binding is not", fix)
        else:
            yield Finding(Level.OK, "GPUs", "none; CPU slices serve")
    for gpu in machine.gpus:
        kind = "MIG instance" if gpu.mig else "GPU"
        text = f"{kind} of {gpu.id}: {gpu.name}, {show_bytes(gpu.memory_bytes)}"
        text += f" ({show_bytes(gpu.memory_free_bytes)} free), {gpu.sms} SMs"
        if not gpu.mig and len(machine.gpus) > 1:
            text += f"; reads the memory of {_readable(machine, gpu)}"
        yield Finding(Level.OK, "GPUs", text)
    if len(machine.links) > 1:
        yield Finding(Level.OK, "links", show_links(machine))
        yield _measured_paths(machine)
    if any(gpu.readable for gpu in machine.gpus):
        text = "one without slices can lend its memory: serve --gpu-slices whole@0 --gpu-peer-bytes"
        yield Finding(Level.OK, "peer memory", text)
    for obstacle in obstacles(machine.gpus) if machine.gpus else ():
        fix = f"{obstacle.fix}; or {CPUS_INSTEAD}"
        yield Finding(Level.FAIL, "GPU slices", obstacle.text, fix)


def _measured_paths(machine: Machine) -> Finding:
    from c2cserve.transfer.path_profile import PathProfileError, load_paths, show_paths

    try:
        return Finding(Level.OK, "paths", show_paths(load_paths(machine.gpus[0].name)))
    except PathProfileError as error:
        return Finding(Level.OK, "paths", str(error))


def _readable(machine: Machine, gpu: Gpu) -> str:
    """Name the server's own GPUs whose memory this one can read, by their numbers."""
    numbers = [f"GPU {other.id}" for other in machine.gpus if other.uuid in gpu.readable]
    return ", ".join(numbers) or "no other GPU"


def check_limits(machine: Machine) -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files} open files"
    if machine.gpus:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        shown = "unlimited" if locked == resource.RLIM_INFINITY else show_bytes(locked)
        text += f", {shown} locked memory"
    if 0 <= files < _FILES_MIN:
        yield Finding(Level.WARN, "limits", text, "ulimit -n 65536: every client takes one")
    else:
        yield Finding(Level.OK, "limits", text)
    maps = int(Path("/proc/sys/vm/max_map_count").read_text())
    if maps < _MAPS_MIN:
        fix = f"sysctl vm.max_map_count={_MAPS_MIN}"
        yield Finding(Level.WARN, "limits", f"{maps} memory maps per process", fix)


_PORT_FIXES = {
    errno.EADDRINUSE: "end what listens there, or serve with another --port",
    errno.EACCES: "serve with a --port from 1024 on, or as a user who may take lower ones",
}
"""What helps where an address cannot be listened on. All other reasons are about the host."""


def check_port(host: str, port: int) -> Iterator[Finding]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            fix = _PORT_FIXES.get(error.errno or 0, "serve with another --host")
            yield Finding(Level.WARN, "port", f"{host}:{port}: {error.strerror}", fix)
            return
    yield Finding(Level.OK, "port", f"{host}:{port} is free")


def check_libraries() -> Iterator[Finding]:
    found: list[str] = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            fix = "make install, or pip install . in the checkout"
            yield Finding(Level.FAIL, "libraries", f"{name} is not installed", fix)
    yield Finding(Level.OK, "libraries", ", ".join(found))


def check_simulator() -> Iterator[Finding]:
    """`simulate` and `plan` work without compiled code, only more slowly. Servers use none."""
    yield Finding(Level.OK, "simulator", f"simulate and plan only: {compiled.status()}")
