"""CUDA's driver as transfers use it, in this process's memory. Streams run when they are pumped.

Types are those of the real bindings, so that arguments are what the bindings accept. A relay kernel
is emulated from the parameters of its launch.
"""

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from c2cserve.kernels.gpu import driver
from c2cserve.transfer.gpu import contexts, flags, links, relay, slots

_REAL = driver.cu
_OK, _NOT_READY = _REAL.CUresult(0), _REAL.CUresult(600)
_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class FakeDriver:
    """The functions that are not here are the real ones."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.streams: dict[int, deque[Callable[[], bool]]] = defaultdict(deque)
        """Operations to run, which return whether they are over."""
        self.context: list[int] = []
        self.copies, self.batches, self.launches = 0, 0, 0
        self.failing: set[int] = set()
        """Streams on which launches fail."""
        self.unpinned: list[tuple[int, int]] = []
        self._events: dict[int, int] = defaultdict(int)
        """Records that are not over."""
        self._numbers = iter(range(1000, 1 << 30))
        self._memory: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(_REAL, name)

    def pump(self) -> None:
        """Run every stream as far as it comes."""
        for operations in list(self.streams.values()):
            while operations and operations[0]():
                operations.popleft()

    def enqueue(self, stream: Any, run: Callable[[], object]) -> tuple[Any]:
        self.streams[int(stream)].append(lambda: run() is not False)
        return (_OK,)

    def cuGetErrorName(self, code: Any) -> tuple[Any, bytes]:  # noqa: N802
        return _OK, b"CUDA_ERROR_OF_A_TEST"

    # ---- contexts and memory --------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[Any]:  # noqa: N802
        return (_OK,)

    def cuDeviceGet(self, number: int) -> tuple[Any, Any]:  # noqa: N802
        assert number < self.gpus
        return _OK, _REAL.CUdevice(number)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, Any]:  # noqa: N802
        return _OK, _REAL.CUcontext(int(device) + 1)

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any]:  # noqa: N802
        self.context.append(int(context))
        return (_OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, Any]:  # noqa: N802
        return _OK, _REAL.CUcontext(self.context.pop())

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any]:  # noqa: N802
        assert int(context)
        return (_OK,)

    def cuDeviceCanAccessPeer(self, one: Any, other: Any) -> tuple[Any, int]:  # noqa: N802
        return _OK, int(int(one) != int(other))

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> tuple[Any]:  # noqa: N802
        assert int(context) != self.context[-1]
        return (_REAL.CUresult(704),)

    def cuMemHostAlloc(self, size: int, how: int) -> tuple[Any, int]:  # noqa: N802
        memory = ctypes.create_string_buffer(size)
        self._memory[ctypes.addressof(memory)] = memory
        return _OK, ctypes.addressof(memory)

    def cuMemHostGetDevicePointer(self, pointer: int, how: int) -> tuple[Any, Any]:  # noqa: N802
        return _OK, _REAL.CUdeviceptr(pointer)

    def cuMemFreeHost(self, pointer: int) -> tuple[Any]:  # noqa: N802
        del self._memory[pointer]
        return (_OK,)

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> tuple[Any, ...]:  # noqa: N802
        assert int(attribute) == int(_REAL.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        assert self.context
        unpinned = any(start <= address < stop for start, stop in self.unpinned)
        return (_REAL.CUresult(1), None) if unpinned else (_OK, _REAL.CUmemorytype(1))

    # ---- streams and events ---------------------------------------------------------------------

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, int, int]:  # noqa: N802
        return _OK, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, Any]:  # noqa: N802
        assert (flags, priority) == (1, -5)
        return _OK, _REAL.CUstream(next(self._numbers))

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any]:  # noqa: N802
        self.pump()
        assert not self.streams[int(stream)]
        return (_OK,)

    def cuStreamDestroy(self, stream: Any) -> tuple[Any]:  # noqa: N802
        return (_OK,)

    def cuEventCreate(self, flags: int) -> tuple[Any, Any]:  # noqa: N802
        return _OK, _REAL.CUevent(next(self._numbers))

    def cuEventDestroy(self, event: Any) -> tuple[Any]:  # noqa: N802
        return (_OK,)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any]:  # noqa: N802
        number = int(event)
        self._events[number] += 1

        def over() -> None:
            self._events[number] -= 1

        return self.enqueue(stream, over)

    def cuEventQuery(self, event: Any) -> tuple[Any]:  # noqa: N802
        return (_NOT_READY if self._events[int(event)] else _OK,)

    def cuStreamWaitValue32(  # noqa: N802
        self, stream: Any, flag: int, value: int, how: int
    ) -> tuple[Any]:
        word = ctypes.c_uint32.from_address(int(flag))
        return self.enqueue(stream, lambda: (word.value - value) % (1 << 32) < 1 << 31)

    def call_on_host(self, stream: int, function: int, argument: int) -> None:
        self.enqueue(stream, lambda: _POST(function)(argument) == 0)

    # ---- copies ---------------------------------------------------------------------------------

    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: Any) -> tuple[Any]:  # noqa: N802
        self.copies += 1
        return self.enqueue(stream, lambda: ctypes.memmove(target, source, size))

    def cuMemcpyBatchAsync(  # noqa: N802
        self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, first: Any,
        attributes_count: int, stream: Any,
    ) -> tuple[Any]:  # fmt: skip
        assert len(targets) == len(sources) == len(sizes) == count
        assert all(isinstance(one, _REAL.CUdeviceptr) for one in (*targets, *sources))
        assert (len(attributes), first, attributes_count) == (1, [0], 1)
        self.batches += 1
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.enqueue(stream, lambda a=target, b=source, n=size: _move(int(a), int(b), n))
        return (_OK,)

    def cuLaunchKernel(  # noqa: N802
        self, function: Any, x: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int,
        stream: Any, pointers: int, extra: int,
    ) -> tuple[Any]:  # fmt: skip
        assert isinstance(function, _REAL.CUfunction)
        assert (y, z, ty, tz, shared, extra) == (1, 1, 1, 1, 0, 0)
        assert x >= 1
        assert threads % 32 == 0
        if int(stream) in self.failing:
            return (_REAL.CUresult(719),)
        address = ctypes.c_void_p.from_address(pointers).value
        assert address is not None
        # Parameters are copied by the launch.
        params = relay.RelayParams.from_buffer_copy(
            ctypes.string_at(address, ctypes.sizeof(relay.RelayParams))
        )
        self.launches += 1
        return self.enqueue(stream, lambda: _relay(params))


def _move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def _relay(p: relay.RelayParams) -> None:
    ctypes.c_uint32.from_address(p.started).value = p.number
    recalled = ctypes.c_uint32.from_address(p.recalled).value
    if (recalled - p.number) % (1 << 32) < 1 << 31:
        return
    for at in range(p.pieces):
        piece = p.piece[at]
        _move(piece.target, piece.source, piece.size)


class FakeStream:
    """`torch.cuda.Stream` on the fake driver."""

    def __init__(self, driver: FakeDriver, gpu: int) -> None:
        self._driver = driver
        self.device = torch.device("cuda", gpu)
        self.cuda_stream = next(driver._numbers)

    def wait_stream(self, other: "FakeStream") -> None:
        event = FakeEvent(self._driver)
        event.record(other)
        self._driver.enqueue(self.cuda_stream, event.query)

    def synchronize(self) -> None:
        self._driver.cuStreamSynchronize(self.cuda_stream)


class FakeEvent:
    """`torch.cuda.Event` on the fake driver."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._event = driver.cuEventCreate(0)[1]

    def record(self, stream: FakeStream) -> None:
        self._driver.cuEventRecord(self._event, stream.cuda_stream)

    def query(self) -> bool:
        return int(self._driver.cuEventQuery(self._event)[0]) == 0

    def synchronize(self) -> None:
        self._driver.pump()
        assert self.query()


class FakeRelay(relay.Relay):
    """The kernel without its code, which needs a GPU."""

    def __init__(self, folder: Path | None = None) -> None:
        self._function = _REAL.CUfunction(1)


def install(monkeypatch: pytest.MonkeyPatch, gpus: int) -> FakeDriver:
    made = FakeDriver(gpus)
    for module in (driver, contexts, flags, links, relay, slots):
        monkeypatch.setattr(module, "cu", made)
    for module in (links, slots):
        monkeypatch.setattr(module, "call_on_host", made.call_on_host)
    monkeypatch.setattr(links, "Relay", FakeRelay)
    monkeypatch.setattr(links, "new_stream", lambda gpu: FakeStream(made, gpu))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(made))
    contexts.context_of.cache_clear()
    return made
