"""How GPUs become slices, and their memory arenas.

A GPU, or a MIG instance, is one slice. Or its SMs are partitioned into equal slices (green
contexts), which share its memory, links and copy engines. A part of the free memory is reserved for
streamed weights, activations and CUDA itself. Arenas take the rest: KV from the front, and
weights in the part that KV leaves. All slices of a GPU, and its MIG instances, share its link.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from c2cserve.core.machine import (
    Gpu,
    GpuShare,
    Machine,
    ProfileChoice,
    Slice,
    SliceKind,
    most_active,
)
from c2cserve.devices.slices import SlicePlanError

SLAB_BYTES = 16 << 20
"""Large slabs: KV blocks of large models take megabytes, and a GPU has gigabytes."""
RESERVE_BYTES = 10 << 30
"""Memory for two streamed weights, activations of the largest step, graphs, CUDA and kernels."""
RESERVE_SHARE = 0.25
"""Most of the free memory that the reserve takes: a small MIG instance has smaller steps."""
SMS_STEP = 8
"""The grain of partitions on Hopper."""
WHOLE = "whole"
_WHOLE = (256, 8192)
_PART = (64, 2048)
"""Sequences and prefill tokens of a step. Weights cross the link once per step, so steps are
large."""


@dataclass(frozen=True, slots=True)
class Partitioning:
    """`parts` slices of `sms` SMs on every GPU."""

    sms: int
    parts: int


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """The GPUs that have slices, and their partitioning."""

    partitioning: Partitioning | None = None
    """None: one slice per GPU."""
    gpus: tuple[int, ...] | None = None
    """Indices among the GPUs that the server sees; None: all."""


def parse_partitioning(text: str) -> Partitioning:
    """Parse a partitioning such as "16x7": seven slices of 16 SMs. Raises `SlicePlanError`."""
    found = re.fullmatch(r"(\d{1,4})x(\d{1,3})", text)
    if found is None:
        raise SlicePlanError(f"{text!r}: GPU slices are given as SMs x slices, such as 16x7")
    sms, parts = int(found[1]), int(found[2])
    if sms < SMS_STEP or sms % SMS_STEP or parts < 1:
        raise SlicePlanError(f"{text}: a partition has a multiple of {SMS_STEP} SMs, at least one")
    return Partitioning(sms, parts)


def parse_layout(text: str) -> GpuLayout:
    """Parse a layout such as "whole", "16x7", "whole@0" or "16x7@0,2". Raises `SlicePlanError`."""
    what, at, where = text.partition("@")
    numbers = re.fullmatch(r"\d{1,3}(,\d{1,3})*", where)
    if at and numbers is None:
        raise SlicePlanError(f"{text!r}: GPUs are given by number, such as {what}@0,1")
    gpus = tuple(dict.fromkeys(int(n) for n in where.split(","))) if at else None
    return GpuLayout(None if what == WHOLE else parse_partitioning(what), gpus)


def plan_gpu_slices(
    machine: Machine,
    layout: GpuLayout = GpuLayout(),
    kv_bytes: int | None = None,
    profile: ProfileChoice = "measured",
    lent_bytes: int = 0,
    lanes: int = 1,
    *,
    relays: bool = False,
) -> tuple[Slice, ...]:
    """Return the slices `gpu0`, `gpu1` ... (`mig0` ... for MIG instances), or `gpu0.0`, `gpu0.1`
    ... of partitioned GPUs.

    `kv_bytes` is for each slice, None for the default rule. Each GPU with slices gets `lent_bytes`
    of every GPU without slices whose memory it can read. `lanes` are those of a slice; partitions
    have one. With `relays`, GPUs with slices lend their links to those whose memory they can reach.

    Raises `SlicePlanError` for missing GPUs, for partitions or arenas that a GPU has no room for,
    and for loans that no GPU can give.
    """
    chosen = range(len(machine.gpus)) if layout.gpus is None else layout.gpus
    for index in chosen:
        if index >= len(machine.gpus):
            raise SlicePlanError(f"there is no GPU {index}: {len(machine.gpus)} were found")
    slices: list[Slice] = []
    partitioning = layout.partitioning
    for index in chosen:
        gpu = machine.gpus[index]
        share = GpuShare(gpu.uuid, gpu.sms, profile=profile)
        if lent_bytes:
            lenders = _lenders(machine.gpus, gpu, chosen, lent_bytes)
            share = replace(share, lenders=lenders, lent_bytes=lent_bytes)
        if relays:
            share = replace(share, neighbours=_neighbours(machine.gpus, gpu, chosen))
        parts = 1 if partitioning is None else partitioning.parts
        if partitioning is not None:
            _check_partitioning(gpu, partitioning)
        arena = _arena_bytes(gpu, parts, kv_bytes)
        for part in range(parts):
            slices.append(_slice(machine, gpu, index, part, partitioning, arena, share))
    if partitioning is None:
        slices = [replace(one, lanes=lanes) for one in slices]
    return tuple(slices)


def visible_gpus(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES lets a process use, None for no such variable. The driver's
    own list knows nothing of it. Like CUDA, stops at the first entry that names no GPU."""
    if variable is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        by_name = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        by_number = [gpu for gpu in gpus if entry.isdigit() and gpu.id == int(entry)]
        found = by_name or by_number
        if not found:
            break
        chosen += [gpu for gpu in found if gpu not in chosen]
    return tuple(chosen)


def _check_partitioning(gpu: Gpu, partitioning: Partitioning) -> None:
    if gpu.mig:
        raise SlicePlanError(f"GPU {gpu.id} is in MIG mode: its instances are slices already")
    wanted = partitioning.sms * partitioning.parts
    if gpu.sms and wanted > gpu.sms:
        raise SlicePlanError(
            f"GPU {gpu.id} has {gpu.sms} SMs: {partitioning.parts} slices of {partitioning.sms}"
            f" need {wanted}"
        )


def _lenders(
    gpus: Sequence[Gpu], borrower: Gpu, with_slices: Sequence[int], lent_bytes: int
) -> tuple[str, ...]:
    free = [gpu for index, gpu in enumerate(gpus) if index not in with_slices and not gpu.mig]
    if not free:
        raise SlicePlanError(
            "no GPU can lend memory: all have slices of their own; say which are to have them,"
            " such as --gpu-slices whole@0"
        )
    lenders = [gpu for gpu in free if gpu.uuid in borrower.readable]
    if not lenders:
        raise SlicePlanError(f"GPU {borrower.id} can read the memory of no GPU without slices")
    for gpu in lenders:
        if lent_bytes * len(with_slices) > _usable(gpu):
            raise SlicePlanError(
                f"GPU {gpu.id} can lend {_usable(gpu)} bytes, not {lent_bytes} to each of"
                f" {len(with_slices)} GPUs"
            )
    return tuple(gpu.uuid for gpu in lenders)


def _neighbours(
    gpus: Sequence[Gpu], target: Gpu, with_slices: Sequence[int]
) -> tuple[str, ...]:  # fmt: skip
    others = [gpus[index] for index in with_slices if gpus[index] is not target]
    found = [gpu for gpu in others if target.uuid in gpu.readable and not (gpu.mig or target.mig)]
    return tuple(gpu.uuid for gpu in found)


def _usable(gpu: Gpu) -> int:
    free = gpu.memory_free_bytes or gpu.memory_bytes
    return int(free - min(RESERVE_BYTES, free * RESERVE_SHARE))


def _arena_bytes(gpu: Gpu, parts: int, kv_bytes: int | None) -> int:
    usable = _usable(gpu)
    arena = usable // parts if kv_bytes is None else kv_bytes
    arena = arena // SLAB_BYTES * SLAB_BYTES
    if arena < SLAB_BYTES or arena * parts > usable:
        raise SlicePlanError(
            f"GPU {gpu.id}: {parts} KV arenas of {arena} bytes, where {usable} of its memory can be"
            f" used and {SLAB_BYTES} are the least"
        )
    return arena


def _slice(
    machine: Machine, gpu: Gpu, index: int, part: int, partitioning: Partitioning | None,
    arena: int, share: GpuShare,
) -> Slice:  # fmt: skip
    kind: SliceKind = "mig" if gpu.mig else "gpu"
    name = f"{kind}{index}"
    if partitioning is not None:
        kind, name = "green", f"{name}.{part}"
        share = replace(share, sms=partitioning.sms, part=part, parts=partitioning.parts)
    max_batch, max_step_tokens = _WHOLE if kind == "gpu" else _PART
    return Slice(
        id=name, kind=kind, cpus=machine.cpus, kv_bytes=arena, slab_bytes=SLAB_BYTES,
        max_batch=max_batch, max_step_tokens=max_step_tokens, max_active=most_active(kind),
        gpu=share, hbm_bytes=arena,
        link=f"gpu{gpu.id}.h2d",
    )  # fmt: skip
