"""The links of this machine's GPUs, as NVML and the kernel describe them.

Speeds are nominal: generation and width of PCIe, one way, less what its encoding takes. Links that
meet in a PCIe switch share the way from there to the host. All of them share the host's memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from c2cserve.core.machine import Gpu, Link, LinkGroup, Machine
from c2cserve.devices.procfs import read_text

_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Per second and lane, by PCIe generation."""
_ENCODING = 128 / 130
_INTERNAL, _HOST_BRIDGE = 0, 30
"""NVML_TOPOLOGY_INTERNAL and NVML_TOPOLOGY_HOSTBRIDGE: between them are PCIe switches."""
_HOST = "host"


def find_links(
    nvml: Any, gpus: Sequence[Gpu], host_read: Link, *, sys: Path = Path("/sys")
) -> tuple[tuple[Link, ...], tuple[LinkGroup, ...]]:
    """Return a link from the host to each whole GPU, and what they share.

    A link's source is the NUMA node of its GPU, as `node0`, or `host` if the kernel does not know.
    `host_read` is the speed of host memory. GPUs that the driver says nothing of are left out, and
    so are MIG instances.
    """
    if nvml is None or not gpus:
        return (), ()
    nvml.nvmlInit()
    try:
        handles: dict[str, Any] = {}
        links: list[Link] = []
        for gpu in gpus:
            if gpu.mig:
                continue
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                rate = _bytes_per_s(nvml, handle)
                source = _node_of(nvml, handle, sys)
            except nvml.NVMLError:
                continue
            link = Link(f"pcie{gpu.id}", source, f"gpu{gpu.id}", rate)
            handles[link.id] = handle
            links.append(link)
        groups = _switches(nvml, links, handles)
    finally:
        nvml.nvmlShutdown()
    if links:
        every = tuple(link.id for link in links)
        groups.append(LinkGroup(_HOST, every, host_read.bytes_per_s))
    return tuple(links), tuple(groups)


def find_gpu_nodes(nvml: Any, gpus: Sequence[Gpu], *, sys: Path = Path("/sys")) -> dict[str, int]:
    """Return the NUMA node of each GPU that the driver and the kernel know, by `uuid`."""
    if nvml is None or not gpus:
        return {}
    found: dict[str, int] = {}
    nvml.nvmlInit()
    try:
        for gpu in gpus:
            try:
                name = _node_of(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid), sys)
            except nvml.NVMLError:
                continue
            if name != _HOST:
                found[gpu.uuid] = int(name.removeprefix("node"))
    finally:
        nvml.nvmlShutdown()
    return found


def _bytes_per_s(nvml: Any, handle: Any) -> float:
    generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    lanes = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    return _GIGATRANSFERS.get(generation, 0.0) * 1e9 / 8 * lanes * _ENCODING


def _node_of(nvml: Any, handle: Any, sys: Path) -> str:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    text = (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()
    domain, _, rest = text.partition(":")  # of eight digits, where the kernel has four
    path = sys / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    node = (read_text(path) or "").strip()
    return f"node{node}" if node.isdigit() else _HOST


def _switches(nvml: Any, links: Sequence[Link], handles: dict[str, Any]) -> list[LinkGroup]:
    """Return the groups of links that meet below the host's bridge."""
    groups: list[LinkGroup] = []
    left = list(links)
    while left:
        first = left.pop(0)
        near = [one for one in left if _meet(nvml, handles[first.id], handles[one.id])]
        left = [one for one in left if one not in near]
        if near:
            members = [first, *near]
            rate = max(one.bytes_per_s for one in members)
            groups.append(LinkGroup(f"switch{len(groups)}", tuple(m.id for m in members), rate))
    return groups


def _meet(nvml: Any, handle: Any, other: Any) -> bool:
    try:
        level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
    except nvml.NVMLError:
        return False
    return _INTERNAL < level < _HOST_BRIDGE


def show_links(machine: Machine) -> str:
    """Return a drawing of the links between the host and its GPUs, in GB/s one way."""
    ours = [link for link in machine.links if link.target.startswith("gpu")]
    groups = {name: group for group in machine.groups for name in group.links if group.id != _HOST}
    together = machine.combined_bytes_per_s(link.id for link in ours)
    lines = [f"host memory; to all GPUs at once {_gb(together)} GB/s, as the driver describes it"]
    sources = sorted({link.source for link in ours})
    for source in sources:
        below = [link for link in ours if link.source == source]
        last_source = source == sources[-1]
        lines.append(f"{_branch(last=last_source)}{source}")
        for link in below:
            shared = groups.get(link.id)
            note = "" if shared is None else f", {shared.id} ({_gb(shared.bytes_per_s)} together)"
            stem = "   " if last_source else "│  "
            lines.append(
                f"{stem}{_branch(last=link is below[-1])}GPU {link.target.removeprefix('gpu')}:"
                f" {_gb(link.bytes_per_s)}{note}{_peers(machine, link)}"
            )
    return "\n".join(lines)


def _branch(*, last: bool) -> str:
    return "└─ " if last else "├─ "


def _peers(machine: Machine, link: Link) -> str:
    numbers = {gpu.uuid: gpu.id for gpu in machine.gpus}
    [gpu] = [one for one in machine.gpus if f"gpu{one.id}" == link.target and not one.mig]
    near = ", ".join(str(numbers[uuid]) for uuid in gpu.readable if uuid in numbers)
    return f"; relays for GPU {near}" if near else ""


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.0f}"
