"""Repeated launches of Triton kernels, which skip Triton's search for the compiled kernel.

Triton finds the compiled kernel anew in every launch, from all arguments. Here the caller gives a
short key with all that the compiled kernel depends on besides alignment. The first launch of a key
goes through Triton. Later ones call the kernel that it returned. Compiled kernels rely on addresses
that are multiples of 16 bytes, so launches with other addresses always go through Triton.
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
    launch: Callable[..., None]
    described: tuple[Any, ...]
    """The arguments between the stream and the kernel's own."""
    constants: tuple[Any, ...]


class Launcher:
    """Launches one kernel, whose parameters are tensors, then numbers, then constants."""

    def __init__(self, kernel: Any, constants: Callable[..., dict[str, Any]]) -> None:
        """`constants(*key)` returns the kernel's `constexpr` parameters except PDL, and its launch
        options."""
        self._kernel = kernel
        self._constants = constants
        self._compiled: dict[tuple[int, _Key], _Compiled] = {}

    def __call__(
        self, grid: Grid, tensors: Sequence[Tensor], numbers: Sequence[int | float], key: _Key
    ) -> None:
        """Launch on the current stream of the tensors' GPU.

        `key` has the values of all numbers that Triton specialises on, and all that constants and
        dtypes follow from. Raises `AssertionError` in the first launch if a number is missing.
        """
        device = tensors[0].get_device()
        compiled = self._compiled.get((device, key))
        if compiled is not None:
            pointers = [tensor.data_ptr() for tensor in tensors]
            odd = 0
            for pointer in pointers:
                odd |= pointer
            if odd % _ALIGNMENT == 0:
                compiled.launch(
                    *grid, current_stream(device), *compiled.described, *pointers, *numbers,
                    *compiled.constants,
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
            covered = isinstance(number, float) or parameter.do_not_specialize or number in key
            assert covered, f"{parameter.name} = {number} is not in the key {key}"
        names = self._kernel.arg_names[first + len(numbers) :]
        launch, described = _launch_of(kernel)
        self._compiled[device, key] = _Compiled(
            launch, described, tuple(constants[name] for name in names)
        )


def _launch_of(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return what launches a compiled kernel, and its arguments behind the stream.

    Triton's launchers are a function in C, and Python around it that allocates scratch memory for
    kernels that need some. Of others the function is called.
    """
    run = kernel.run
    # The three None are launch hooks, which only Triton's own profilers need.
    described = (kernel.packed_metadata, None, None, None)
    sizes = [getattr(run, f"{name}_scratch_size", None) for name in ("global", "profile")]
    if sizes != [0, 0]:
        return run, (kernel.function, *described)
    options = run.launch_cooperative_grid, run.launch_pdl
    return run.launch, (kernel.function, *options, None, None, *described)


def current_stream(device: int) -> int:
    """Return the driver's handle of the current stream of a GPU. torch makes an object for it."""
    active: Any = triton.runtime.driver.active
    return active.get_current_stream(device)
