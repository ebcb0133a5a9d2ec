"""Small tensors of models on their way to a device, which never make the host wait.

A plain copy to a GPU waits for all that its stream has before it. In a lane of streams that may be
a second, and the slice's thread has the steps of another lane to launch meanwhile.
"""

import torch
from torch import Tensor


def placed(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return the tensor on `device` (None: the host), in the order of the current stream."""
    if device is None or device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def release(tensor: Tensor) -> None:
    """Note that the caller is about to drop a tensor which work of the current stream still reads.

    Its memory is reused in the order of the stream that it was made on, which may be another one.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
