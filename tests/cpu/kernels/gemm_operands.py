"""Operands at given addresses, on a GPU that is not there, and a context that notes launches."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu.aot.variants import Variant


class Operand:
    """What launchers ask of a tensor [rows, columns], or of a vector, at a given address."""

    def __init__(
        self, address: int, *shape: int, row_stride: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.address, self.shape, self.dtype = address, torch.Size(shape), dtype
        self.device = torch.device("cuda:0")
        self._strides = (row_stride or shape[-1], 1)[-len(shape) :]

    def data_ptr(self) -> int:
        return self.address

    def dim(self) -> int:
        return len(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def stride(self, dimension: int | None = None) -> Any:
        return self._strides if dimension is None else self._strides[dimension]

    def __getitem__(self, _: object) -> "Operand":
        return self

    def view(self, *_: object) -> "Operand":
        return self

    def zero_(self) -> None: ...

    def copy_(self, _: object) -> None: ...


class Repository:
    def kernel(self, variant: Variant) -> str:
        return variant.name


@dataclass
class Context:
    """A launch context of 100 clusters, whose scratch memory lies at known addresses."""

    repository: Repository = field(default_factory=Repository)
    plans: dict[Any, Any] = field(default_factory=dict)
    share_pointer: int = 512
    sms: int = 100
    launched: list[tuple[Any, int, bytes, bool, Home]] = field(default_factory=list)

    def clusters(self, variant: Variant, home: Home = "hbm") -> int:
        return 100

    def scratch(self, name: str, size: int) -> Any:
        return Operand({"ring": 1 << 33, "ring-flags": 1 << 34}[name], size)

    def launch(self, variant: Variant, clusters: int, given: Any, **how: Any) -> None:
        self.run(variant.name, clusters * variant.cluster, given, **how)

    def run(
        self, kernel: Any, ctas: int, given: ctypes.Array[ctypes.c_char], *, pdl: bool = False,
        home: Home = "hbm",
    ) -> None:  # fmt: skip
        self.launched.append((kernel, ctas, bytes(given), pdl, home))


def described(*what: object) -> bytes:
    """Stand in for a tensor map: what it was made of, as text."""
    return repr(what).encode().ljust(128)[:128]
