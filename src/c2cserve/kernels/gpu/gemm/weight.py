"""A weight as kernels take it: its address, its shape, and its home."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from c2cserve.core.tensors import HalfDtype, Home

TORCH_DTYPES: dict[HalfDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES: dict[torch.dtype, HalfDtype] = {value: name for name, value in TORCH_DTYPES.items()}
ITEM_BYTES = 2


class OperandError(ValueError):
    """A kernel cannot take a tensor. The message says which, what it is, and what is needed."""


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """W [N, K], or [experts, N, K], contiguous, rows of K 16-bit elements.

    `pointer` is an address that the multiplying GPU can read. It is in its HBM, in a peer's HBM
    (`driver.enable_peer` must have run), or in host memory registered in this process
    (`memory.pinning`). `owner` keeps the memory alive as long as the handle lives.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: HalfDtype
    home: Home
    owner: object = field(default=None, compare=False, repr=False)
    map_pointer: int = 0
    """The address of the weight's tensor map in GPU memory (`launchers.direct.weight_map`), or 0.

    Graphs are replayed with other weights: their launches read this map, and no other pointer.
    """
    transposed: Tensor | None = field(default=None, compare=False, repr=False)
    """W^T [K, N] as a tensor for libraries. `for_libraries` makes it once for many steps."""

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise OperandError(f"a weight is [N, K] or [experts, N, K], not {self.shape}")

    @property
    def n(self) -> int:
        return self.shape[-2]

    @property
    def k(self) -> int:
        return self.shape[-1]

    @property
    def experts(self) -> int:
        """The number of experts; 0 for a dense weight."""
        return self.shape[0] if len(self.shape) == 3 else 0

    @property
    def rows(self) -> int:
        """The number of rows of the matrix [experts x N, K]."""
        return max(1, self.experts) * self.n

    @property
    def bytes(self) -> int:
        return self.rows * self.k * ITEM_BYTES


def weight_of(tensor: Tensor, home: Home) -> WeightHandle:
    """Return the handle of a tensor that is on a GPU (`hbm`, `peer`) or pinned on the host.

    Raises `OperandError` if it is not contiguous, not 16-bit, or not at `home`.
    """
    if tensor.dtype not in DTYPES:
        raise OperandError(f"weights are bfloat16 or float16, not {tensor.dtype}")
    if not tensor.is_contiguous():
        raise OperandError(f"weights are contiguous: strides {tensor.stride()} are not")
    on_host = tensor.device.type == "cpu"
    if on_host != (home == "host"):
        raise OperandError(f"a tensor on {tensor.device} is not at home {home!r}")
    if on_host and not tensor.is_pinned():
        raise OperandError("a host weight must be pinned (memory.pinning), or the GPU faults on it")
    shape = tuple(tensor.shape)
    return WeightHandle(tensor.data_ptr(), shape, DTYPES[tensor.dtype], home, tensor)


def local_weight(w: WeightHandle) -> Tensor:
    """Return W as a tensor in this GPU's memory, for libraries. Raises `OperandError` unless
    `weight_of` made the handle from such a tensor."""
    if w.home != "hbm" or not isinstance(w.owner, Tensor):
        raise OperandError(f"W at home {w.home!r} is not a tensor in this GPU's memory")
    base = w.owner.data_ptr()
    first = (w.pointer - base) // w.owner.element_size()
    flat = w.owner.view(TORCH_DTYPES[w.dtype]).flatten()
    return flat[first : first + w.rows * w.k].view(w.shape)


def for_libraries(w: WeightHandle) -> WeightHandle:
    """Return the handle of a matrix in this GPU's memory with `transposed` set. Raises
    `OperandError` as `local_weight` does."""
    return w if w.transposed is not None else replace(w, transposed=local_weight(w).t())
