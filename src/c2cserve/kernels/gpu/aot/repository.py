"""The kernels a process has loaded. Serving never compiles: what is not built is an error."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from c2cserve.kernels.gpu.aot.compiler import cubin_path, default_folder
from c2cserve.kernels.gpu.aot.variants import SHARED_BYTES, BuiltKernel, Variant
from c2cserve.kernels.gpu.driver import checked, cu

_core: Any = import_module("cuda.core")  # compiled, like the driver's module


class KernelMissingError(LookupError):
    """A variant was asked for that is not built; names it and the command that builds it."""

    def __init__(self, variant: BuiltKernel, folder: Path) -> None:
        self.variant = variant
        where = "" if folder == default_folder() else f" --folder {folder}"
        super().__init__(
            f"the kernel {variant.name} is not in {folder}: run `c2cserve kernels build{where}`"
        )


class Repository:
    """Cubins of a folder as kernels of one GPU, each loaded when first asked for (milliseconds)
    or all at once by `load`."""

    def __init__(self, device: int, folder: Path | None = None) -> None:
        self.device = device
        self.folder = folder or default_folder()
        self._kernels: dict[Variant, Any] = {}
        self._loaded: list[object] = []
        """cuda-core's own objects: the code is unloaded when they go."""

    def load(self, variants: Iterable[Variant]) -> None:
        """Load the kernels. Raises `KernelMissingError` for the first that is not built."""
        for variant in variants:
            self.kernel(variant)

    def kernel(self, variant: Variant) -> Any:
        """The driver's handle. Raises `KernelMissingError`."""
        if variant not in self._kernels:
            self._kernels[variant] = self._load(variant)
        return self._kernels[variant]

    def _load(self, variant: Variant) -> Any:
        path = cubin_path(self.folder, variant)
        if not path.exists():
            raise KernelMissingError(variant, self.folder)
        torch.cuda.init()
        kernel = _core.ObjectCode.from_cubin(path.read_bytes(), name=variant.name).get_kernel(
            variant.source
        )
        handle = cu.CUkernel(int(kernel.handle))
        shared = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        result = cu.cuKernelSetAttribute(shared, SHARED_BYTES, handle, cu.CUdevice(self.device))
        checked(f"cuKernelSetAttribute({variant.name})", result)
        self._loaded.append(kernel)
        return handle
