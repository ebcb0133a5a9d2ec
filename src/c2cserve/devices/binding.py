"""Finding a slice's GPU in a process: CUDA's device numbers are not the driver's."""

import os

import torch

from c2cserve.core.machine import GpuShare

_QUEUES = "32"
"""Work queues to a GPU. With the usual 8, slices of one process wait for each other's launches."""


class BindingError(RuntimeError):
    """The slice's GPU is not there for this process."""


def bind(share: GpuShare) -> int:
    """Return CUDA's number of the slice's GPU in this process. A MIG instance becomes the only
    device of the process. Call it before the process's first use of CUDA. Raises `BindingError`."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _QUEUES)
    if share.uuid.startswith("MIG-"):
        os.environ["CUDA_VISIBLE_DEVICES"] = share.uuid
        _check_there()
        return 0
    return find_device(share.uuid)


def find_device(uuid: str) -> int:
    """Return CUDA's number of a GPU that this process sees. Raises `BindingError`."""
    _check_there()
    wanted = uuid.removeprefix("GPU-")
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-") == wanted:
            return device
    raise BindingError(
        f"CUDA shows this process {torch.cuda.device_count()} GPUs, {uuid} is not among them"
    )


def _check_there() -> None:
    if not torch.cuda.is_available():
        raise BindingError("torch finds no GPU: is it a build for CUDA, and the driver loaded?")
