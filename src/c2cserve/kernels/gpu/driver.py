"""The CUDA driver as launchers need it: tensor maps, launches, copies on streams, peer access."""

import ctypes
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Literal

import torch

from c2cserve.kernels.gpu.host_borders import cut_at_borders

cu: Any = import_module("cuda.bindings.driver")
"""The driver's functions. Type checkers cannot read this compiled module."""

MapType = Literal["bfloat16", "float16", "float32"]

_TYPES = {
    "bfloat16": (cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
    "float16": (cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
    "float32": (cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
}
_ROW_BYTES = 128
"""The length of a box's row: the span of the swizzle."""
MAP_BYTES = 128


class CudaError(RuntimeError):
    """A driver call failed. The message has the call and the name of CUDA's error."""


def checked(call: str, result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call. Raises `CudaError`."""
    code, *values = result
    if int(code) != 0:
        _, name = cu.cuGetErrorName(code)
        text = name.decode() if isinstance(name, bytes) else str(code)
        raise CudaError(f"{call}: {text} ({int(code)})")
    return values[0] if len(values) == 1 else values


@lru_cache(maxsize=4096)
def tensor_map(
    pointer: int, rows: int, columns: int, row_stride: int, box_rows: int, dtype: MapType
) -> bytes:
    """Return the TMA unit's description of a matrix. `row_stride` is in elements.

    TMA copies boxes of `box_rows` rows of 128 bytes, which are swizzled in shared memory. Outside
    the matrix, reads give zeros and writes are dropped. Raises `CudaError` for a matrix that the
    unit cannot address.
    """
    item_bytes = _TYPES[dtype][1]
    return _encode(pointer, (columns, rows), (row_stride * item_bytes,), (box_rows,), dtype)


@lru_cache(maxsize=4096)
def stack_map(
    pointer: int, matrices: int, rows: int, columns: int, box_rows: int, dtype: MapType
) -> bytes:
    """Describe `matrices` contiguous matrices, one after another. A box stays within one."""
    return _encode_stack(pointer, matrices, rows, columns, (box_rows, 1), dtype)


@lru_cache(maxsize=4096)
def pair_map(pointer: int, rows: int, columns: int, box_rows: int, dtype: MapType) -> bytes:
    """Describe two such matrices: a box has `box_rows` rows of the first, then of the second."""
    return _encode_stack(pointer, 2, rows, columns, (box_rows, 2), dtype)


def _encode_stack(
    pointer: int, matrices: int, rows: int, columns: int, box: tuple[int, int], dtype: MapType
) -> bytes:
    row_bytes = columns * _TYPES[dtype][1]
    strides = (row_bytes, rows * row_bytes)
    return _encode(pointer, (columns, rows, matrices), strides, box, dtype)


def _encode(
    pointer: int, sizes: tuple[int, ...], strides: tuple[int, ...], box_sizes: tuple[int, ...],
    dtype: MapType,
) -> bytes:  # fmt: skip
    kind, item_bytes = _TYPES[dtype]
    box = (_ROW_BYTES // item_bytes, *box_sizes)
    result = cu.cuTensorMapEncodeTiled(
        kind, len(sizes), pointer,
        [cu.cuuint64_t(size) for size in sizes],
        [cu.cuuint64_t(stride) for stride in strides],
        [cu.cuuint32_t(size) for size in box],
        [cu.cuuint32_t(1)] * len(sizes),
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    return ctypes.string_at(checked("cuTensorMapEncodeTiled", result).getPtr(), MAP_BYTES)


@cache
def _pdl_attribute() -> Any:
    """Return the attribute that lets a kernel start before the previous one in its stream ends."""
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def launch(
    kernel: Any,
    grid: int,
    threads: int,
    shared_bytes: int,
    stream: int,
    parameters: ctypes.Array[ctypes.c_char],
    *,
    pdl: bool,
) -> None:
    """Launch a kernel with one parameter struct on a stream. Raises `CudaError`.

    With `pdl` it may begin before earlier kernels have ended, and waits for them in its own code.
    """
    config = _launch_config(grid, threads, shared_bytes, stream, pdl)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
    checked("cuLaunchKernelEx", cu.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))


@lru_cache(maxsize=1024)
def _launch_config(grid: int, threads: int, shared_bytes: int, stream: int, pdl: bool) -> Any:
    """Return the driver's description of a launch. Launches only read it."""
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = cu.CUstream(stream)
    if pdl:
        config.attrs = [_pdl_attribute()]
        config.numAttrs = 1
    return config


def new_stream(device: int) -> torch.cuda.Stream:
    """Return a new stream of the device, which lives as long as the process.

    torch's streams come from a pool, and two users may get the same one.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # makes the device's context
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = checked("cuStreamCreate", cu.cuStreamCreate(int(flags)))
    return torch.cuda.ExternalStream(int(stream), device=device)


def copy_async(target: int, source: int, size: int, stream: int) -> None:
    """Copy `size` bytes by a copy engine, between any two memories. Host memory is of one
    registration."""
    checked("cuMemcpyAsync", cu.cuMemcpyAsync(target, source, size, cu.CUstream(stream)))


def copy_from_host(target: int, source: int, size: int, stream: int) -> None:
    """Copy `size` bytes out of registered host memory by a copy engine. Registrations may meet
    within them."""
    for offset, part in cut_at_borders(source, size):
        copy_async(target + offset, source + offset, part, stream)


def hold_back(stream: int, word: int) -> None:
    """Have no later kernel of the stream begin before all earlier work has ended.

    A kernel that may begin early does so beside a kernel before it, but not beside a memset. Four
    bytes at `word`, which nothing reads, are set to 0. Raises `CudaError`.
    """
    checked("cuMemsetD32Async", cu.cuMemsetD32Async(word, 0, 1, cu.CUstream(stream)))


def signal(stream: int, flag: int, value: int) -> None:
    """Set a 32-bit flag in GPU memory once all earlier work of the stream is done."""
    checked("cuStreamWriteValue32", cu.cuStreamWriteValue32(cu.CUstream(stream), flag, value, 0))


def wait_at_least(stream: int, flag: int, value: int) -> None:
    """Hold the stream back until a 32-bit flag has reached `value`."""
    reached = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    result = cu.cuStreamWaitValue32(cu.CUstream(stream), flag, value, int(reached))
    checked("cuStreamWaitValue32", result)


@cache
def enable_peer(device: int, peer: int) -> None:
    """Let kernels on `device` read `peer`'s memory. Raises `CudaError` if they cannot.

    torch enables this for the process, with its first copy between the two GPUs. Enabling it twice
    would leave a CUDA error behind.
    """
    if not torch.cuda.can_device_access_peer(device, peer):
        raise CudaError(f"GPU {device} cannot read GPU {peer}'s memory: no peer access")
    torch.zeros(1, device=f"cuda:{peer}").to(f"cuda:{device}")
    torch.zeros(1, device=f"cuda:{device}").to(f"cuda:{peer}")
    torch.cuda.synchronize(device)
