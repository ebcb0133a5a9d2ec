"""Checks of operands before a launch, and the parameter structs of the device code."""

import ctypes
from collections.abc import Mapping
from functools import cache
from struct import Struct
from typing import NamedTuple

from torch import Tensor

from c2cserve.kernels.gpu.gemm.weight import TORCH_DTYPES, OperandError, WeightHandle

_ALIGNMENT = 16
_ROWS_MAX = 2**31 - 1


class OutputParams(ctypes.Structure):
    """`Output` of pipeline.cuh."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("stride", ctypes.c_int64),
        ("columns", ctypes.c_int32),
    )


class FeedParams(ctypes.Structure):
    """`Feed` of pipeline.cuh: addresses in GPU memory, or 0."""

    _fields_ = (("map", ctypes.c_uint64), ("ns_per_byte", ctypes.c_uint64))


def check(
    x: Tensor, w: WeightHandle, bias: Tensor | None, out: Tensor, *, grouped: bool = False,
    gated: bool = False,
) -> None:  # fmt: skip
    """Raise `OperandError` unless the operands fit every dataflow.

        x [M, K]    out [M, N], or [M, N / 2] if `gated`    bias [N]
        W [N, K], or [experts, N, K] if `grouped`

    All have W's dtype, and all but W are on one GPU. Rows of x and out may be strided.
    """
    dtype, n = TORCH_DTYPES[w.dtype], w.n
    columns = n // 2 if gated else n
    if gated and n % 2:
        raise OperandError(f"W is {list(w.shape)}: a gate and what it gates are as many rows")
    if bool(w.experts) != grouped:
        wanted = "[experts, N, K] here" if grouped else "[N, K]: experts' rows need offsets"
        raise OperandError(f"W is {list(w.shape)}, not {wanted}")
    if x.dim() != 2 or x.shape[1] != w.k:
        raise OperandError(f"x is {list(x.shape)}: W {list(w.shape)} needs [M, {w.k}]")
    if out.shape != (x.shape[0], columns):
        raise OperandError(f"out is {list(out.shape)}, not [{x.shape[0]}, {columns}]")
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        raise OperandError(f"bias is {list(bias.shape)}, not a contiguous [{n}]")
    for name, tensor in (("x", x), ("out", out), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise OperandError(f"{name} is {tensor.dtype}, W is {dtype}")
        if tensor.device.type != "cuda" or tensor.device != x.device:
            raise OperandError(f"{name} is on {tensor.device}, x on {x.device}: one GPU, please")
        if tensor.stride(-1) != 1:
            raise OperandError(f"{name}'s last dimension has stride {tensor.stride(-1)}, not 1")
    if out.shape[0] > 1 and out.stride(0) < columns:
        raise OperandError(
            f"out's rows of {columns} elements overlap: they are {out.stride(0)} apart"
        )
    if max(x.shape[0], w.rows) > _ROWS_MAX:
        raise OperandError(f"{max(x.shape[0], w.rows)} rows are too many for 32-bit coordinates")


def check_boxes(x: Tensor, w: WeightHandle) -> None:
    """Raise `OperandError` unless rows of x and W begin at multiples of 16 bytes, as TMA needs."""
    if w.k % 8:
        raise OperandError(f"K = {w.k} is not a multiple of 8: use `prefetch` or `resident`")
    if w.pointer % _ALIGNMENT or x.data_ptr() % _ALIGNMENT:
        raise OperandError("W and x must start at multiples of 16 bytes")
    if x.shape[0] > 1 and x.stride(0) % 8:
        raise OperandError(f"x's rows are {x.stride(0)} elements apart, not a multiple of 8")


def output(out: Tensor, bias: Tensor | None) -> OutputParams:
    return OutputParams(
        out.data_ptr(), 0 if bias is None else bias.data_ptr(), out.stride(0), out.shape[1]
    )


Field = type[int] | type[ctypes.Structure] | int
"""What a field is: a number, a struct, or so many bytes."""
_DRIVER_BYTES = 64
"""Tensor maps align the C++ struct to 64 bytes, so the driver may read up to 64 bytes more."""
_OUTPUT, _FEED = Struct("@QQqi4x"), Struct("@QQ")


def output_bytes(out: Tensor, bias: Tensor | None) -> bytes:
    """Return `output(out, bias)` as bytes, in less time."""
    address = 0 if bias is None else bias.data_ptr()
    return _OUTPUT.pack(out.data_ptr(), address, out.stride(0), out.shape[1])


def feed_bytes(map_pointer: int, share_pointer: int) -> bytes:
    """Return `FeedParams` as bytes, in less time."""
    return _FEED.pack(map_pointer, share_pointer)


class Layout(NamedTuple):
    """Where the fields of a kernel's parameter struct lie, and a type of memory for them."""

    fields: Struct
    memory: type[ctypes.Array[ctypes.c_char]]

    def pack(self, *values: bytes | int) -> ctypes.Array[ctypes.c_char]:
        memory = self.memory()
        self.fields.pack_into(memory, 0, *values)
        return memory


def parameters(**fields: bytes | int | OutputParams | FeedParams) -> ctypes.Array[ctypes.c_char]:
    """Return a kernel's parameter struct, laid out as in C++.

    bytes           a tensor map, 128 bytes
    int, `*_ptr`    a pointer, 8 bytes
    another int     4 bytes
    """
    values = fields.values()
    kinds = tuple([len(value) if isinstance(value, bytes) else type(value) for value in values])
    layout = _layout(tuple(fields), kinds)
    return layout.pack(
        *[bytes(one) if isinstance(one, ctypes.Structure) else one for one in values]
    )


def layout_of(fields: Mapping[str, Field]) -> Layout:
    """Return the layout of a struct with these fields, as `parameters` has it."""
    return _layout(tuple(fields), tuple(fields.values()))


@cache
def _layout(names: tuple[str, ...], kinds: tuple[Field, ...]) -> Layout:
    layout = Struct("@" + "".join(map(_format, names, kinds)))
    return Layout(layout, ctypes.c_char * (layout.size + _DRIVER_BYTES))


def _format(name: str, kind: Field) -> str:
    """Return a field in the format of `struct`. Structs begin at multiples of 8 bytes."""
    if isinstance(kind, int):
        return f"{kind}s"
    if issubclass(kind, ctypes.Structure):
        return f"0Q{ctypes.sizeof(kind)}s"
    return "Q" if name.endswith("_ptr") else "i"
