"""The machine of `weights_mix.py`: its GPUs, its speeds, and what a cell's server is told.

A cell's slice is planned by the server's own rule (`devices.plan`), for the live server and for the
simulation alike. So a cell that the machine cannot do is refused before anything starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mix_load import Arena

from c2cserve.core.machine import Gpu, Machine, ProfileChoice, Slice
from c2cserve.devices.discover import discover
from c2cserve.devices.plan import NO_GPUS, SliceWishes, plan_all
from c2cserve.engine.gpu.requirements import obstacles, usable_gpus
from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
from c2cserve.kernels.gpu.gemm.choice.profile import Profile, ProfileError, load_profile

IMAGINED = {
    "NVIDIA H200": 143_771 << 20,
    "NVIDIA H100 80GB HBM3": 81_559 << 20,
}
"""GPUs that can be simulated where there is none -> memory as the driver counts it."""
_ONE_SLICE = "whole@0"
_STEP_S = 0.5e-3
"""What a step takes beside reading weights and KV: 4.48 ms at batch 1, where the floor is 3.97
(`gpu_engine_h200x2.json`)."""
_REQUEST_S = 3e-3
_CPU_BYTES_PER_S, _CPU_FLOPS = 10e9, 1e11


class Refused(ValueError):
    """This machine cannot do it; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a simulation needs to know of a slice. 0: there is no such link."""

    source: str
    hbm_bytes_per_s: float
    flops: float
    h2d_bytes_per_s: float = 0.0
    d2h_bytes_per_s: float = 0.0
    duplex_bytes_per_s: float = 0.0
    """Both directions of the host's link at once."""
    peer_bytes_per_s: float = 0.0
    step_s: float = _STEP_S
    """Fixed time of a step, where no step times were measured."""
    request_s: float = _REQUEST_S
    """Time of a request outside of steps, where none was measured."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and how its GPUs' dataflows are picked. Without GPUs it has one CPU slice."""

    machine: Machine
    speeds: Speeds
    profile: ProfileChoice = "measured"
    imagined: bool = False
    """It is not this machine: only a simulation can use it."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.machine.gpus

    def described(self) -> dict[str, Any]:
        return {
            "gpus": [gpu.name for gpu in self.gpus], "imagined": self.imagined,
            **asdict(self.speeds),
        }  # fmt: skip

    def plan(self, arena: Arena, host_kv_bytes: int) -> Slice:
        """Return the slice of a cell, with the speed of its link as the server knows it
        (`serving.startup.with_links`). Raises Refused."""
        try:
            [slice_] = plan_all(self.machine, self._wishes(arena, host_kv_bytes))
        except ValueError as error:
            raise Refused(str(error)) from error
        if self.gpus and not self.imagined:
            for one in obstacles(self.gpus, self.profile, lent=arena.lent_bytes > 0):
                raise Refused(f"{one.text}: {one.fix}")
        rate = 0.0 if slice_.gpu is None else self.speeds.h2d_bytes_per_s
        return replace(slice_, link_bytes_per_s=rate)

    def _wishes(self, arena: Arena, host_kv_bytes: int) -> SliceWishes:
        if not self.gpus:
            return SliceWishes(
                cpu_slices=1, cpu_kv_bytes=arena.bytes, gpu_slices=NO_GPUS,
                gpu_peer_bytes=arena.lent_bytes, host_kv_bytes=host_kv_bytes,
            )  # fmt: skip
        return SliceWishes(
            gpu_slices=_ONE_SLICE, gpu_kv_bytes=arena.bytes, gpu_profile=self.profile,
            gpu_peer_bytes=arena.lent_bytes, host_kv_bytes=host_kv_bytes,
        )  # fmt: skip

    def serve_arguments(self, arena: Arena, host_kv_bytes: int) -> list[str]:
        """Return what `c2cserve serve` is told to have the slice of `plan`."""
        arguments = ["--host-kv-bytes", str(host_kv_bytes)]
        if not self.gpus:
            arguments += ["--gpu-slices", NO_GPUS, "--slices", "1"]
            size = "--kv-bytes"
        else:
            arguments += ["--gpu-slices", _ONE_SLICE, "--gpu-profile", self.profile]
            arguments += ["--gpu-peer-bytes", str(arena.lent_bytes)]
            size = "--gpu-kv-bytes"
        return arguments if arena.bytes is None else [*arguments, size, str(arena.bytes)]


def this_machine(profile: Path | None, *, tiny: bool) -> Host:
    """Return this machine; with `tiny` its CPUs alone. Raises Refused, GpuProblem."""
    if tiny:
        speeds = Speeds("assumed for a CPU", _CPU_BYTES_PER_S, _CPU_FLOPS)
        return Host(discover(), replace(speeds, step_s=1e-4))
    gpus = usable_gpus()
    if not gpus:
        raise Refused("there is no GPU: --tiny runs on CPUs, --simulate-only needs no GPU")
    found, choice, note = _profile(profile, gpus[0].name, gpus[0].memory_bytes)
    return Host(discover(gpus=gpus), _speeds(found, note), choice)


def imagined_machine(gpu: str, profile: Path | None) -> Host:
    """Return a machine with two of these GPUs, on which nothing else runs. Raises Refused."""
    size = IMAGINED[gpu]
    found, choice, note = _profile(profile, gpu, size)
    names = ("imagined-0", "imagined-1")
    gpus = tuple(
        Gpu(i, name, gpu, size, sms=found.machine.sms, readable=(names[1 - i],))
        for i, name in enumerate(names)
    )
    machine = replace(discover(gpus=gpus), memory_available_bytes=1 << 40)
    return Host(machine, _speeds(found, note), choice, imagined=True)


def earlier_machine(described: Mapping[str, Any]) -> Host:
    """Return the machine of an earlier result, as `Host.described` has it."""
    known = {field.name for field in fields(Speeds)}
    speeds = Speeds(**{name: value for name, value in described.items() if name in known})
    if not described["gpus"]:
        return Host(discover(), speeds, imagined=True)
    return replace(imagined_machine(described["gpus"][0], None), speeds=speeds)


def _profile(path: Path | None, gpu: str, size: int) -> tuple[Profile, ProfileChoice, str]:
    """Return the GPU's own profile, or known rates where there is none. Raises Refused."""
    try:
        found = load_profile(path, gpu=gpu)
    except ProfileError as error:
        if path is not None:
            raise Refused(str(error)) from error
        known = assumed_profile(gpu, size)
        return known.profile, "assumed", known.note
    return found, "measured", f"profile of {found.date:%Y-%m-%d %H:%M} UTC"


def _speeds(profile: Profile, source: str) -> Speeds:
    host, peer = profile.links["host"], profile.links.get("peer")
    return Speeds(
        source=source,
        hbm_bytes_per_s=max(rate.read_bytes_per_s for rate in profile.hbm),
        flops=max(rate.flops_per_s for rate in profile.matmul_flops),
        h2d_bytes_per_s=host.to_gpu_bytes_per_s,
        d2h_bytes_per_s=host.from_gpu_bytes_per_s,
        duplex_bytes_per_s=host.duplex_bytes_per_s,
        peer_bytes_per_s=0.0 if peer is None else peer.to_gpu_bytes_per_s,
    )


def weights_bytes_per_s(
    speeds: Speeds, lent_bytes: int, models: Sequence[tuple[int, float]]
) -> float:
    """Return the mean speed at which weights reach the slice.

    `models` has (bytes, popularity) of each, the most popular first. Lent memory has copies of the
    first ones, as far as it reaches; the rest comes from the host:

        rate = sum(p * bytes) / sum(p * (lent / peer + (bytes - lent) / host))
    """
    left, moved, took_s = lent_bytes, 0.0, 0.0
    for size, weight in models:
        near = min(left, size)
        left -= near
        moved += weight * size
        took_s += weight * (size - near) / speeds.h2d_bytes_per_s
        if near:
            took_s += weight * near / speeds.peer_bytes_per_s
    return moved / took_s
