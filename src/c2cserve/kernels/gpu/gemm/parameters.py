"""The parameter structs of the GEMM kernels, as C++ lays them out, and their packing."""

import ctypes
from struct import Struct

from torch import Tensor

from c2cserve.kernels.gpu.gemm.weight import WeightHandle

MAP, OUTPUT, FEED, POINTER, NUMBER = "128s", "0QQQqi4x", "0QQQ", "Q", "i"
"""Fields in the format of `struct`: a tensor map, `Output` and `Feed` of pipeline.cuh, a pointer,
and an int. Structs begin at multiples of 8 bytes."""
_DRIVER_BYTES = 64
"""Tensor maps align the C++ struct to 64 bytes, so the driver may read up to 64 bytes more."""


class Layout:
    """Where the fields of a kernel's parameter struct lie, and a type of memory for them."""

    def __init__(self, **fields: str) -> None:
        self.fields = fields
        self._struct = Struct("@" + "".join(fields.values()))
        self._memory = ctypes.c_char * (self._struct.size + _DRIVER_BYTES)

    def pack(self, *values: bytes | int) -> ctypes.Array[ctypes.c_char]:
        """Return the struct with these values, in the order of its fields. `OUTPUT` is the four of
        `output`, and `FEED` is the two of `feed`."""
        memory = self._memory()
        self._struct.pack_into(memory, 0, *values)
        return memory


DIRECT = Layout(
    x=MAP, w=MAP, slot=MAP, out=OUTPUT, feed=FEED, m=NUMBER, n=NUMBER, k=NUMBER
)  # fmt: skip
SPLIT = Layout(x=MAP, w=MAP, out=OUTPUT, feed=FEED, m=NUMBER, n=NUMBER, k=NUMBER)
GROUPED = Layout(
    x=MAP, w=MAP, out=OUTPUT, feed=FEED, offsets=POINTER, experts=NUMBER, n=NUMBER, k=NUMBER
)
RING = Layout(
    x=MAP, w=MAP, out=OUTPUT, home=POINTER, ring=POINTER, filled=POINTER, drained=POINTER,
    m=NUMBER, n=NUMBER, k=NUMBER, panel_rows=NUMBER, slots=NUMBER, copiers=NUMBER,
)  # fmt: skip
HYBRID = Layout(
    x=MAP, w=MAP, partial=MAP, out=OUTPUT, m=NUMBER, n=NUMBER, k=NUMBER, columns_sym=NUMBER,
    ctas_sym=NUMBER,
)  # fmt: skip


def output(out: Tensor, bias: Tensor | None) -> tuple[int, int, int, int]:
    """Return the values of `OUTPUT`: addresses of out and bias, out's stride and columns."""
    address = 0 if bias is None else bias.data_ptr()
    return out.data_ptr(), address, out.stride(0), out.shape[1]


def feed(w: WeightHandle, share_pointer: int) -> tuple[int, int]:
    """Return the values of `FEED`: where W's map and the limit of its link lie in GPU memory. Each
    is 0 if there is none."""
    return w.map_pointer, 0 if w.home == "hbm" else share_pointer
