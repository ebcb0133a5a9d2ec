"""Machines to simulate, from data files: compute, memory and links of their slices."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from c2cserve.core.machine import (
    GpuShare,
    Link,
    LinkGroup,
    Slice,
    SliceKind,
    most_active,
    relayed_bytes_per_s,
)
from c2cserve.policy.baselines.presets import C2CSERVE, Preset
from c2cserve.sim.world.host_thread import HostTimes
from c2cserve.sim.world.tables import KernelTimes, Tables, read_kernels, read_tables

_SLAB_BYTES = 64 << 20
"""Coarse slabs: bookkeeping of an arena of many GB should not cost more than its decisions."""
SLICE_FIELDS = (
    "hbm_bytes", "kv_bytes", "slab_bytes", "max_batch", "max_step_tokens", "max_active",
)  # fmt: skip
"""Fields of `core.machine.Slice` that a layout may set."""


class UnknownHardware(ValueError):
    """There is no such machine or layout; the message lists those there are."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one device is cut into equal slices. Bandwidth is a slice's own share of its memory."""

    slices: int
    kind: SliceKind
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: float
    """FLOP per second that large GEMMs reach, 16 bit."""
    sms: int = 0
    slice: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fields of `core.machine.Slice` that an operator's choices do not change."""


@dataclass(frozen=True, slots=True)
class Device:
    """`count` equal GPUs or CPU sockets. `h2d_bytes_per_s` 0: weights are in its own memory."""

    name: str
    count: int
    layouts: Mapping[str, Layout]
    h2d_bytes_per_s: float = 0.0
    d2h_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    """Speed of loading whole models, where that is less than the link's; 0: the link's. It is the
    same for every policy."""
    step_s: float = 0.0
    """Fixed cost of a step: launches, sampling, the host's part."""
    table: str = ""
    """The device's name in `tables`."""
    kernels: KernelTimes | None = None
    """Measured times of kernels on all of its SMs."""


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    source: str
    pool_bytes: int
    disk_bytes_per_s: float
    """Speed of loading from files into the pool."""
    host_links: Mapping[str, tuple[float, tuple[str, ...]]]
    """Links that all devices share: id -> bytes per second, and its directions ("h2d", "d2h")."""
    devices: tuple[Device, ...]
    tables: Tables
    request_s: float = 0.0
    """Time of a request outside of slices: HTTP, tokenizing, messages."""
    step_error: str = ""
    """Where its step times are from, and how far they are from measured ones; "": not known."""


@dataclass(frozen=True, slots=True)
class SimulatedSlice:
    """A slice with its speeds and links."""

    slice: Slice
    node: str
    """The device it is part of."""
    flops: float
    hbm_bytes_per_s: float
    load_bytes_per_s: float
    """Speed of loading whole models. Over a link they get no more than their share."""
    step_s: float
    table: str
    h2d: tuple[str, ...] = ()
    """Links that weights come over; empty: weights are in local memory."""
    relays: tuple[tuple[str, ...], ...] = ()
    """Routes over neighbours' links, which loads of whole models may take besides."""
    d2h: tuple[str, ...] = ()
    compute: str = ""
    """The "link" of capacity 1 by which parts of a node share its time; empty: it is not shared."""
    kernels: KernelTimes | None = None
    """Measured times, of a GPU that is not cut. They replace the roofline and `step_s`."""
    host: HostTimes | None = None
    """What the host does for its steps; None: nothing, as `step_s` stands for it."""


@dataclass(frozen=True, slots=True)
class SimMachine:
    hardware: Hardware
    slices: tuple[SimulatedSlice, ...]
    links: tuple[tuple[str, float], ...]


def _data(*parts: str) -> Any:
    path = files("c2cserve.sim") / "data"
    for part in parts:
        path = path / part
    return path


def names() -> list[str]:
    """Return the names of the packaged machines."""
    return sorted(Path(str(p)).stem for p in _data("hardware").iterdir() if p.name.endswith("toml"))


@cache
def _packaged(name: str) -> Hardware:
    return parse(name, _data("hardware", f"{name}.toml").read_text())


def find(name: str) -> Hardware:
    """Find a packaged machine by name, or one by the path of its TOML file.

    Raises UnknownHardware, OSError, and ValueError for a file that describes no machine."""
    if name in names():
        return _packaged(name)
    if name.endswith(".toml"):
        try:
            return parse(Path(name).stem, Path(name).read_text(), Path(name).parent)
        except KeyError as error:
            raise ValueError(f"{name}: there is no key {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    raise UnknownHardware(f"no hardware {name!r}; there are: {', '.join(names())}")


def parse(name: str, text: str, folder: Path | None = None) -> Hardware:
    """Parse TOML (docs/simulator.md names the keys).

    `folder` contains its tables; None: they are packaged. Raises KeyError, TypeError, ValueError,
    OSError."""
    raw = tomllib.loads(text)

    def read(file: str) -> Any:
        path = _data("tables", file) if folder is None else folder / file
        return json.loads(path.read_text())

    tables = read_tables(read(raw["tables"])) if "tables" in raw else Tables({})
    host = raw["host"]
    return Hardware(
        name=name,
        source=raw["source"],
        pool_bytes=int(host["pool_bytes"]),
        disk_bytes_per_s=float(host["disk_bytes_per_s"]),
        host_links={
            link["id"]: (float(link["bytes_per_s"]), tuple(link["directions"]))
            for link in host.get("links", [])
        },
        devices=tuple(_device(row, read) for row in raw["devices"]),
        tables=tables,
        request_s=float(host.get("request_s", 0.0)),
        step_error=str(raw.get("step_error", "")).strip().replace("\n", " "),
    )


def _device(row: Mapping[str, Any], read: Callable[[str], Any]) -> Device:
    apart = {"layouts", "source", "kernels"}
    keys = {key: value for key, value in row.items() if key not in apart}
    if "kernels" in row:
        keys["kernels"] = read_kernels(read(row["kernels"]))
    layouts = {
        name: Layout(
            slices=int(one["slices"]),
            kind=one["kind"],
            hbm_bytes=int(one["hbm_bytes"]),
            hbm_bytes_per_s=float(one["hbm_bytes_per_s"]),
            flops=float(one["flops"]),
            sms=int(one.get("sms", 0)),
            slice=_slice_fields(one.get("slice", {})),
        )
        for name, one in row["layouts"].items()
    }
    return Device(**keys, layouts=layouts)


def _slice_fields(raw: Mapping[str, Any]) -> dict[str, int]:
    for key in raw:
        if key not in SLICE_FIELDS:
            raise ValueError(f"slices have no {key}; there are {', '.join(SLICE_FIELDS)}")
    return {key: int(value) for key, value in raw.items()}


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """Settings that an operator chooses for every slice."""

    kv_share: float = 0.5
    """KV's share of a slice's memory; the rest caches weights."""
    max_batch: int = 64
    max_step_tokens: int = 2048
    max_active: int | None = None
    """None: as many as a server has active on a slice of the kind."""
    host_kv_bytes: int = 0
    """Host memory for paused KV of each slice that has memory of its own."""
    relays: bool = False
    """GPUs of a kind lend each other their links for loads (`serve --gpu-relays`)."""
    lanes: int = 1
    """Lanes of whole GPUs and MIG instances (`core.step.Lane`)."""


def build(
    name: str, settings: SliceSettings | None = None, preset: Preset = C2CSERVE
) -> SimMachine:
    """Build the machine `NAME` or `NAME:LAYOUT`. The default is each device's first layout.

    A preset with parts divides the memory of each slice for good; the parts share its time. If
    weights do not stream, weights and KV share all memory. Raises UnknownHardware."""
    settings = settings or SliceSettings()
    if not preset.streams:
        settings = replace(settings, kv_share=1.0)
    base, _, layout = name.partition(":")
    hardware = find(base)
    slices: list[SimulatedSlice] = []
    links = [(link, rate) for link, (rate, _) in hardware.host_links.items()]
    for device in hardware.devices:
        chosen = _layout(device, layout, hardware)
        for number in range(device.count):
            node = f"{device.name}{number}"
            slices += _slices_of(hardware, device, chosen, node, settings, preset)
            if preset.parts > 1:
                links += [(f"{node}.{n}.compute", 1.0) for n in range(chosen.slices)]
            if device.h2d_bytes_per_s > 0:
                links.append((f"{node}.h2d", device.h2d_bytes_per_s))
                links.append((f"{node}.d2h", device.d2h_bytes_per_s))
    return SimMachine(hardware, tuple(slices), tuple(links))


def _layout(device: Device, name: str, hardware: Hardware) -> Layout:
    """Return the chosen layout. CPUs have one layout, whatever was chosen for the GPUs."""
    if not name or (name not in device.layouts and len(hardware.devices) > 1):
        return next(iter(device.layouts.values()))
    if name not in device.layouts:
        known = ", ".join(device.layouts)
        raise UnknownHardware(f"{hardware.name} has no layout {name!r}; there are: {known}")
    return device.layouts[name]


def _slices_of(
    hardware: Hardware,
    device: Device,
    layout: Layout,
    node: str,
    settings: SliceSettings,
    preset: Preset,
) -> list[SimulatedSlice]:
    parts = preset.parts
    streams = device.h2d_bytes_per_s > 0
    load_bytes_per_s = device.load_bytes_per_s or device.h2d_bytes_per_s
    routes = {
        way: (f"{node}.{way}", *(i for i, (_, ways) in hardware.host_links.items() if way in ways))
        for way in ("h2d", "d2h")
    }
    gpus = sum(one.count for one in hardware.devices if one.h2d_bytes_per_s > 0)
    shared = [rate for rate, ways in hardware.host_links.values() if "h2d" in ways]
    link_share = min([device.h2d_bytes_per_s, *(rate / max(1, gpus) for rate in shared)])
    hbm_bytes = layout.hbm_bytes // parts
    kv_bytes = int(hbm_bytes * settings.kv_share) // _SLAB_BYTES * _SLAB_BYTES
    neighbours = _neighbours(device, node) if streams and settings.relays else []
    relayed = _relayed_bytes_per_s(hardware, device, node, neighbours) if neighbours else 0.0
    slices: list[SimulatedSlice] = []
    for index in range(layout.slices * parts):
        slice_ = Slice(
            id=node if layout.slices * parts == 1 else f"{node}.{index}",
            kind=layout.kind,
            kv_bytes=kv_bytes,
            slab_bytes=_SLAB_BYTES,
            max_batch=settings.max_batch,
            max_step_tokens=settings.max_step_tokens,
            max_active=settings.max_active or most_active(layout.kind),
            gpu=None if layout.kind == "cpu" else GpuShare(node, layout.sms),
            hbm_bytes=hbm_bytes,
            link=routes["h2d"][0] if streams else "",
            link_bytes_per_s=link_share / (layout.slices * parts) if streams else 0.0,
            relayed_bytes_per_s=relayed / (layout.slices * parts),
            host_kv_bytes=settings.host_kv_bytes if streams else 0,
            lanes=settings.lanes if layout.kind in ("gpu", "mig") and parts == 1 else 1,
        )
        slice_ = replace(slice_, **layout.slice)
        simulated = SimulatedSlice(
            slice=slice_,
            node=node,
            flops=layout.flops,
            hbm_bytes_per_s=layout.hbm_bytes_per_s,
            load_bytes_per_s=load_bytes_per_s,
            step_s=device.step_s,
            table=device.table,
            h2d=routes["h2d"] if streams else (),
            relays=tuple((f"{one}.h2d", *routes["h2d"][1:]) for one in neighbours),
            d2h=routes["d2h"] if streams else (),
            compute=f"{node}.{index // parts}.compute" if parts > 1 else "",
            kernels=device.kernels if device.kernels and device.kernels.sms == layout.sms else None,
        )
        slices.append(simulated)
    return slices


def _neighbours(device: Device, node: str) -> list[str]:
    every = (f"{device.name}{number}" for number in range(device.count))
    return [one for one in every if one != node]


def _relayed_bytes_per_s(
    hardware: Hardware, device: Device, node: str, neighbours: Sequence[str]
) -> float:
    """Return what neighbours add to a device's link, by the numbers that a server goes by."""
    nodes = (node, *neighbours)
    links = [Link(one, "host", one, device.h2d_bytes_per_s) for one in nodes]
    groups = [
        LinkGroup(name, nodes, rate)
        for name, (rate, ways) in hardware.host_links.items()
        if "h2d" in ways
    ]
    return relayed_bytes_per_s(links, groups, node, neighbours)
