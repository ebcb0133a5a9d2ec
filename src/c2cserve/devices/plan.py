"""All slices of a machine: GPU slices if it has GPUs, CPU slices otherwise or if asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from c2cserve.core.machine import Machine, ProfileChoice, Slice
from c2cserve.devices.gpu_slices import parse_layout, plan_gpu_slices
from c2cserve.devices.slices import SlicePlanError, plan_pool_bytes, plan_slices

NO_GPUS = "none"
ANY_GPUS = "auto"
HOST_KV_BYTES_MAX = 4 << 30
"""The most host memory that a GPU slice gets for KV by itself: registering it takes time."""
HOST_KV_BYTES_MIN = 64 << 20
HOST_KV_SHARE = 1 / 4
"""The share of the memory that the pool leaves, for all GPU slices together."""


@dataclass(frozen=True, slots=True)
class SliceWishes:
    """The slices that the operator asks for; None leaves the choice to the default rule."""

    cpu_slices: int | None = None
    cpu_threads: int | None = None
    cpu_kv_bytes: int | None = None
    """KV bytes of each CPU slice."""
    gpu_slices: str = ANY_GPUS
    """The layout of GPU slices. "auto": as "whole" if there is a GPU. "none": no GPU slices.
    "whole": one per GPU or MIG instance. "16x7": seven slices of 16 SMs on every GPU. "whole@0",
    "16x7@0,2": only on the GPUs with these numbers."""
    gpu_kv_bytes: int | None = None
    """KV bytes of each GPU slice."""
    gpu_profile: ProfileChoice = "measured"
    gpu_peer_bytes: int = 0
    """Memory that each GPU without slices lends to each GPU that has some."""
    host_kv_bytes: int | None = None
    """Host memory of each slice for KV of requests that are paused. None: GPU slices get some where
    there is memory (`_own_host_kv_bytes`), CPU slices none."""
    gpu_lanes: int = 2
    """Lanes of each GPU slice that is a whole GPU or MIG instance."""
    gpu_relays: bool = False
    """GPUs with slices lend each other their links."""


def plan_all(
    machine: Machine, wishes: SliceWishes, pool_bytes: int | None = None
) -> tuple[Slice, ...]:
    """Return all slices, GPU slices first. `pool_bytes` are kept free for the pool, None: what the
    rule gives it. Raises `SlicePlanError` for wishes that do not fit."""
    slices = _gpu_slices(machine, wishes)
    if not slices or wishes.cpu_slices is not None or wishes.cpu_threads is not None:
        slices += plan_slices(machine, wishes.cpu_slices, wishes.cpu_threads, wishes.cpu_kv_bytes)
    if wishes.host_kv_bytes is None:
        host_kv_bytes = _own_host_kv_bytes(machine, slices, pool_bytes)
        return tuple(
            one if one.gpu is None else replace(one, host_kv_bytes=host_kv_bytes) for one in slices
        )
    wanted = wishes.host_kv_bytes * len(slices)
    if wanted > machine.memory_available_bytes:
        raise SlicePlanError(
            f"{wanted} bytes of host memory for paused requests of {len(slices)} slices, where"
            f" {machine.memory_available_bytes} are available"
        )
    return tuple(replace(one, host_kv_bytes=wishes.host_kv_bytes) for one in slices)


def _own_host_kv_bytes(machine: Machine, slices: Sequence[Slice], pool_bytes: int | None) -> int:
    """Return the host memory of each GPU slice for KV.

    All slices share a quarter of what the pool leaves. None has more than 4 GiB, or more than its
    arena. Less than 64 MiB is not worth it: then none has any."""
    arenas = [one.kv_bytes for one in slices if one.gpu is not None]
    if not arenas:
        return 0
    pool_bytes = plan_pool_bytes(machine) if pool_bytes is None else pool_bytes
    fair = int((machine.memory_available_bytes - pool_bytes) * HOST_KV_SHARE) // len(arenas)
    size = min(HOST_KV_BYTES_MAX, fair, *arenas)
    return size if size >= HOST_KV_BYTES_MIN else 0


def _gpu_slices(machine: Machine, wishes: SliceWishes) -> tuple[Slice, ...]:
    if wishes.gpu_slices == NO_GPUS or (wishes.gpu_slices == ANY_GPUS and not machine.gpus):
        if wishes.gpu_peer_bytes:
            raise SlicePlanError("GPUs lend memory to GPU slices: there are none")
        return ()
    layout = parse_layout("whole" if wishes.gpu_slices == ANY_GPUS else wishes.gpu_slices)
    if not machine.gpus:
        raise SlicePlanError(f"{wishes.gpu_slices} GPU slices: there is no GPU")
    return plan_gpu_slices(
        machine, layout, wishes.gpu_kv_bytes, wishes.gpu_profile, wishes.gpu_peer_bytes,
        wishes.gpu_lanes, relays=wishes.gpu_relays,
    )  # fmt: skip
