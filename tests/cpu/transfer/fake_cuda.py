"""A library that stands in for CUDA's driver (fake_cuda.cpp), and streams on it."""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

_SOURCE = Path(__file__).parent / "fake_cuda.cpp"


def build(folder: Path) -> Path:
    library = folder / "libcuda_fake.so"
    command = ["g++", "-std=c++17", "-fPIC", "-shared", str(_SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    return library


@dataclass
class FakeStream:
    """`torch.cuda.Stream`, for the engine."""

    cuda_stream: int
    device: torch.device


class FakeCuda:
    """Contexts are numbers: one more than the GPU's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.fake_stream.restype = ctypes.c_void_p
        self._library.fake_count.restype = ctypes.c_int64

    def stream(self, gpu: int) -> FakeStream:
        handle = self._library.fake_stream(ctypes.c_void_p(gpu + 1))
        return FakeStream(handle, torch.device("cuda", gpu))

    def destroy(self, stream: FakeStream) -> None:
        assert self.destroy_if_idle(stream)

    def destroy_if_idle(self, stream: FakeStream) -> bool:
        """Return whether the stream had nothing to do."""
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(stream.device.index + 1))
        idle = self._library.cuStreamSynchronize(ctypes.c_void_p(stream.cuda_stream)) == 0
        if idle:
            assert self._library.cuStreamDestroy_v2(ctypes.c_void_p(stream.cuda_stream)) == 0
        self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return idle

    def pump(self) -> None:
        """Run every stream as far as it comes."""
        self._library.fake_pump()

    def block(self, stream: int, *, blocked: bool = True) -> None:
        """Let a stream stand still, or go on."""
        self._library.fake_block(ctypes.c_void_p(stream), blocked)

    def fail(self, stream: int) -> None:
        """Let all launches on a stream fail from now on."""
        self._library.fake_fail(ctypes.c_void_p(stream))

    def unpin(self, start: int, stop: int) -> None:
        """Let these addresses be memory that is not pinned, and all others pinned."""
        self._library.fake_unpin(ctypes.c_uint64(start), ctypes.c_uint64(stop))

    def border(self, start: int, stop: int, size: int) -> None:
        """Let these addresses be registered memory in pieces, which meet at multiples of `size`.
        Copies across are refused. 0: there are none."""
        self._library.fake_borders(*map(ctypes.c_uint64, (start, stop, size)))

    def copy(self, target: int, source: int, size: int, stream: FakeStream) -> None:
        """Copy on a caller's stream."""
        gpu = stream.device.index
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(gpu + 1))
        copied = self._library.cuMemcpyAsync(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size),
            ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        assert copied == 0
        self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    @property
    def copies(self) -> int:
        return self._library.fake_count(0)

    @property
    def batches(self) -> int:
        return self._library.fake_count(1)

    @property
    def launches(self) -> int:
        return self._library.fake_count(2)

    @property
    def left(self) -> int:
        """Contexts that are current somewhere, streams, events and host memory."""
        return self._library.fake_count(3) + self._library.fake_count(4)
