"""Triton kernels launched again and again without asking Triton which compiled kernel it is.

Triton works that out from every argument of every launch. Here a caller says in a short key all
that the compiled kernel depends on besides alignment, and the kernel that Triton returned for the
first launch of a key is called from then on. Tensors at odd addresses go Triton's way: compiled
kernels rely on multiples of 16 bytes.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from c2cserve.kernels.gpu.programmatic_launch import PDL_OPTIONS

_ALIGNMENT = 16

Grid = tuple[int, int, int]
_Key = tuple[Hashable, ...]


class _Compiled(NamedTuple):
    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Launcher:
    """One kernel, whose parameters are tensors, then numbers, then constants."""

    def __init__(self, kernel: Any, constants: Callable[..., dict[str, Any]]) -> None:
        """`constants(*key)`: the kernel's `constexpr` parameters (but PDL) and its options."""
        self._kernel = kernel
        self._constants = constants
        self._compiled: dict[tuple[int, _Key], _Compiled] = {}

    def __call__(
        self, grid: Grid, tensors: Sequence[Tensor], numbers: Sequence[int | float], key: _Key
    ) -> None:
        """Launch on the current stream of the tensors' GPU.

        `key`: the values of all numbers that Triton specialises on, and all that constants and
        dtypes follow from. A number that is missing from it is an AssertionError, in the first
        launch.
        """
        device = tensors[0].get_device()
        compiled = self._compiled.get((device, key))
        if compiled is not None:
            pointers = [tensor.data_ptr() for tensor in tensors]
            odd = 0
            for pointer in pointers:
                odd |= pointer
            if odd % _ALIGNMENT == 0:
                # No launch hooks (the three None): nothing here is profiled by Triton's own tools.
                compiled.run(
                    *grid, _stream(device), compiled.function, compiled.metadata, None, None, None,
                    *pointers, *numbers, *compiled.constants,
                )  # fmt: skip
                return
        self._launch_by_triton(grid, tensors, numbers, key)

    def _launch_by_triton(
        self, grid: Grid, tensors: Sequence[Tensor], numbers: Sequence[int | float], key: _Key
    ) -> None:
        constants = {**self._constants(*key), **PDL_OPTIONS}
        kernel = self._kernel[grid](*tensors, *numbers, **constants)
        device = tensors[0].get_device()
        aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)
        if kernel is None or device < 0 or not aligned:
            return  # interpreted, only compiled, or compiled for this alignment
        first = len(tensors)
        for number, parameter in zip(numbers, self._kernel.params[first:], strict=False):
            known = isinstance(number, float) or parameter.do_not_specialize or number in key
            assert known, f"{parameter.name} = {number} is not in the key {key}"
        names = self._kernel.arg_names[first + len(numbers) :]
        self._compiled[device, key] = _Compiled(
            kernel.run,
            kernel.function,
            kernel.packed_metadata,
            tuple(constants[name] for name in names),
        )


def _stream(device: int) -> int:
    """The current stream of a GPU, as Triton launches on it."""
    active: Any = triton.runtime.driver.active
    return active.get_current_stream(device)
