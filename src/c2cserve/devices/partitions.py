"""Partitions of a GPU's SMs inside one process (green contexts): slices without MIG.

A partition has SMs of its own; L2, HBM, copy engines and links stay shared. All partitions of a GPU
come from one split, so they never overlap (separate splits may return the same SMs). Source: CUDA
driver API, "Green Contexts".
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

_NON_BLOCKING = 1


class PartitionError(RuntimeError):
    """The GPU cannot be split this way. The message says what is possible, or the driver's
    error."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Some SMs of a GPU. Only work on `stream` or on `new_stream()` is bound to them; other streams
    of the process use the whole GPU. A graph runs on the SMs of the stream it was captured on."""

    device: int
    sms: int
    stream: torch.cuda.Stream
    context: Any
    """The green context, which holds the SMs until it is closed."""

    def new_stream(self) -> torch.cuda.Stream:
        """Return another stream of the same SMs."""
        return _stream(import_module("cuda.bindings.driver"), self.context, self.device)


def split_sms(device: int, sms_each: int, count: int) -> list[Partition]:
    """Return `count` partitions of at least `sms_each` SMs each (the driver rounds up, on Hopper to
    a multiple of 8). Call it once per GPU. Raises `PartitionError`."""
    cu: Any = import_module("cuda.bindings.driver")
    torch.zeros(1, device=f"cuda:{device}")  # creates the primary context
    handle = _checked(cu, "cuDeviceGet", cu.cuDeviceGet(device))
    kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _checked(cu, "cuDeviceGetDevResource", cu.cuDeviceGetDevResource(handle, kind))
    result = cu.cuDevSmResourceSplitByCount(count, whole, 0, sms_each)
    groups, made, _ = _checked(cu, "cuDevSmResourceSplitByCount", result)
    if made < count:
        raise PartitionError(
            f"GPU {device} has {whole.sm.smCount} SMs: {made} partitions of {sms_each}, not {count}"
        )
    partitions: list[Partition] = []
    for group in groups[:count]:
        described = cu.cuDevResourceGenerateDesc([group], 1)
        description = _checked(cu, "cuDevResourceGenerateDesc", described)
        flags = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        created = cu.cuGreenCtxCreate(description, handle, int(flags))
        context = _checked(cu, "cuGreenCtxCreate", created)
        stream = _stream(cu, context, device)
        partitions.append(Partition(device, group.sm.smCount, stream, context))
    return partitions


def _stream(cu: Any, context: Any, device: int) -> torch.cuda.Stream:
    created = cu.cuGreenCtxStreamCreate(context, _NON_BLOCKING, 0)
    stream = _checked(cu, "cuGreenCtxStreamCreate", created)
    return torch.cuda.ExternalStream(int(stream), device=device)


def _checked(cu: Any, call: str, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        _, name = cu.cuGetErrorName(code)
        raise PartitionError(f"{call}: {name.decode() if isinstance(name, bytes) else code}")
    return values[0] if len(values) == 1 else values
