"""GPUs by NVML (the `gpu` extra). Without NVML or without a driver, no GPU is found."""

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

from c2cserve.core.machine import Gpu

_P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ. The bindings' own constant is a tuple, which their call refuses."""


class GpuProblem(Exception):
    """There seem to be GPUs, but the driver answers with an error."""


def find_nvml() -> ModuleType | None:
    """Return the NVML binding, None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None


def find_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """Return the GPUs that work can run on. If MIG is on, these are its instances.

    `nvml` is the `pynvml` module or a fake of it, None for no GPUs. Raises `GpuProblem` when the
    driver answers with an error.
    """
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return ()
    except nvml.NVMLError as error:
        raise GpuProblem(str(error)) from error
    try:
        found: list[Gpu] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            found += _device(nvml, index)
        return tuple(found)
    except nvml.NVMLError as error:
        raise GpuProblem(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> list[Gpu]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    instances = _mig_instances(nvml, handle)
    if instances is None:
        whole = _describe(nvml, index, handle, _sms(nvml, handle), mig=False)
        return [replace(whole, readable=_readable(nvml, index, handle))]
    return [
        _describe(nvml, index, instance, _mig_sms(nvml, instance), mig=True)
        for instance in instances
    ]


def _mig_instances(nvml: Any, handle: Any) -> list[Any] | None:
    """Return the MIG instances, None when MIG is off or the GPU does not support it."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:
        return None
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    instances: list[Any] = []
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
        except nvml.NVMLError_NotFound:
            continue
    return instances


def _readable(nvml: Any, index: int, handle: Any) -> tuple[str, ...]:
    names: list[str] = []
    for other in range(nvml.nvmlDeviceGetCount()):
        if other == index:
            continue
        neighbour = nvml.nvmlDeviceGetHandleByIndex(other)
        try:
            status = nvml.nvmlDeviceGetP2PStatus(handle, neighbour, _P2P_READ)
        except nvml.NVMLError_NotSupported:
            continue
        if status == nvml.NVML_P2P_STATUS_OK:
            names.append(_text(nvml.nvmlDeviceGetUUID(neighbour)))
    return tuple(names)


def _describe(nvml: Any, index: int, handle: Any, sms: int, *, mig: bool) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        id=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        sms=sms,
        mig=mig,
        memory_free_bytes=int(memory.free),
    )


def _sms(nvml: Any, handle: Any) -> int:
    """Return the number of SMs, 0 if unknown. NVML counts cores: 64 per SM on Volta, Turing and
    GA100, 128 on later architectures."""
    try:
        cores = int(nvml.nvmlDeviceGetNumGpuCores(handle))
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError_NotSupported:
        return 0
    per_sm = 64 if (major, minor) in {(7, 0), (7, 5), (8, 0)} else 128
    return cores // per_sm


def _mig_sms(nvml: Any, instance: Any) -> int:
    return int(nvml.nvmlDeviceGetAttributes(instance).multiprocessorCount)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
