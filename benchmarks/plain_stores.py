"""Copies by kernels whose threads load and store 16 bytes at a time, for comparison with the bulk
copies of relays. Compiled when it is first used, and only benchmarks use it."""

import ctypes
from functools import cache
from importlib import import_module
from typing import Any

from c2cserve.kernels.gpu.driver import checked, cu
from c2cserve.transfer.gpus import use

STORES = {"st": "st.global", "st.cs": "st.global.cs", "st.wt": "st.global.wt"}
"""Instructions by name: as usual, marked as read once, written through."""
_THREADS, _UNROLL = 512, 8
_SOURCE = r"""
constexpr int kUnroll = UNROLL;

extern "C" __global__ void __launch_bounds__(THREADS) plain(uint4* to, const uint4* from, long n) {
  const long step = long(gridDim.x) * THREADS;
  long at = long(blockIdx.x) * THREADS + threadIdx.x;
  for (; at + (kUnroll - 1) * step < n; at += kUnroll * step) {
    uint4 v[kUnroll];
    // Not .nc: such loads may move behind stores, one by one.
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "l"(from + at + i * step));
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      asm volatile("STORE.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + at + i * step), "r"(v[i].x),
                   "r"(v[i].y), "r"(v[i].z), "r"(v[i].w)
                   : "memory");
  }
  for (; at < n; at += step) to[at] = from[at];
}
"""


@cache
def compiled(store: str) -> Any:
    """Return the object code with one of `STORES`."""
    core: Any = import_module("cuda.core")
    text = _SOURCE.replace("UNROLL", str(_UNROLL)).replace("THREADS", str(_THREADS))
    options = core.ProgramOptions(arch="sm_90")
    program = core.Program(text.replace("STORE", STORES[store]), "c++", options)
    return program.compile("cubin")


class PlainCopy:
    def __init__(self, gpu: int, ctas: int, store: str) -> None:
        self._gpu, self._ctas = gpu, ctas
        self._code = compiled(store)
        self._function = cu.CUfunction(int(self._code.get_kernel("plain").handle))

    def launch(self, piece: tuple[int, int, int], stream: int) -> None:
        """Let a stream of the GPU copy (target, source, size), all of them multiples of 16."""
        target, source, size = piece
        values = [ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_int64(size // 16)]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with use(self._gpu):
            launched = cu.cuLaunchKernel(
                self._function, self._ctas, 1, 1, _THREADS, 1, 1, 0, cu.CUstream(stream),
                ctypes.addressof(pointers), 0,
            )  # fmt: skip
            checked("cuLaunchKernel(plain)", launched)
