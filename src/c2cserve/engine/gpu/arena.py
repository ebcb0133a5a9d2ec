"""One allocation of a GPU's memory, made at a slice's start and never given back."""

import torch
from torch import Tensor


class GpuMemoryError(RuntimeError):
    """A GPU has no room for what a slice takes of it."""


def gpu_arena(device: torch.device, size: int, option: str) -> Tensor:
    """Allocate `size` bytes, uint8. Raises `GpuMemoryError`, which names the `option` to change."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise GpuMemoryError(
            f"{device} has {free} of {total} bytes free, a slice takes {size} there:"
            f" serve with a smaller {option}, or end what else uses the GPU"
        ) from error
