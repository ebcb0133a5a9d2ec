"""All slices of a machine: its GPUs where there are some, its CPUs where there are none or where
somebody asks for both."""

from dataclasses import dataclass

from c2cserve.core.machine import Machine, ProfileChoice, Slice
from c2cserve.devices.gpu_slices import parse_partitioning, plan_gpu_slices
from c2cserve.devices.slices import SlicePlanError, plan_slices

NO_GPUS = "none"


@dataclass(frozen=True, slots=True)
class SliceWishes:
    """What was asked for; None is the rule's own choice."""

    cpu_slices: int | None = None
    cpu_threads: int | None = None
    cpu_kv_bytes: int | None = None
    """Of each CPU slice."""
    gpu_slices: str | None = None
    """None: one per GPU. "16x7": of every GPU seven of 16 SMs. "none": GPUs are left alone."""
    gpu_kv_bytes: int | None = None
    """Of each GPU slice."""
    gpu_profile: ProfileChoice = "measured"


def plan_all(machine: Machine, wishes: SliceWishes) -> tuple[Slice, ...]:
    """GPU slices first. Raises `SlicePlanError` for what does not fit."""
    gpus = _gpu_slices(machine, wishes)
    if gpus and wishes.cpu_slices is None and wishes.cpu_threads is None:
        return gpus
    cpus = plan_slices(machine, wishes.cpu_slices, wishes.cpu_threads, wishes.cpu_kv_bytes)
    return gpus + cpus


def _gpu_slices(machine: Machine, wishes: SliceWishes) -> tuple[Slice, ...]:
    if wishes.gpu_slices == NO_GPUS:
        return ()
    partitioning = None if wishes.gpu_slices is None else parse_partitioning(wishes.gpu_slices)
    if partitioning is not None and not machine.gpus:
        raise SlicePlanError(f"{wishes.gpu_slices} GPU slices: there is no GPU")
    return plan_gpu_slices(machine, partitioning, wishes.gpu_kv_bytes, wishes.gpu_profile)
