"""CUDA programs that know nothing of multipath, for benchmarks/multipath.py and tests on GPUs.

python benchmarks/multipath_program.py WHAT [NUMBER ...]   prints a line of JSON

random SEED OPERATIONS   a sum of all memory after random work on all GPUs
model GIGABYTES          seconds of Module.to, of pinned weights
sizes                    microseconds of one copy, by its size
small                    microseconds of a copy of 4 KiB
allocations              microseconds of an allocation, after a large copy
mapped                   blocking copies, of memory that is mapped for one GPU
forked                   copies before and after a fork
loop                     copies without end
"""

import ctypes
import hashlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_MIB = 1 << 20
_SIZE = 4 * _MIB
_CAPTURES = threading.Lock()
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Buffer:
    """Memory, and the event of the last operation on it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last = torch.cuda.Event()


class RandomWork:
    """Work on one GPU, whose result depends on the seed only: each operation on a buffer comes
    after the last one, in its stream, by an event, or by a wait of the host."""

    def __init__(self, gpu: int, seed: int) -> None:
        self.random = random.Random(seed)
        torch.cuda.set_device(gpu)
        noise = torch.Generator().manual_seed(seed)

        def bytes_of(**where: Any) -> Buffer:
            made = torch.randint(256, (_SIZE,), dtype=torch.uint8, generator=noise)
            return Buffer(made.to(**where) if where else made)

        self.gpu = [bytes_of(device=f"cuda:{gpu}") for _ in range(4)]
        self.host = [bytes_of() for _ in range(6)]
        for one in self.host[:4]:
            one.memory = one.memory.pin_memory()
        registered = self.host[4].memory  # the last one is pageable
        assert not int(torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), _SIZE, 0))
        self.streams = [
            torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1),
            torch.cuda.Stream(),
        ]  # fmt: skip
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.functions: list[object] = []
        torch.cuda.synchronize()

    def run(self, operations: int) -> str:
        choices: list[Callable[[], None]] = [
            *[self.copy] * 12, *[self.kernel] * 3, self.copy_now, self.graph, self.host_writes,
            self.host_function, self.wait,
        ]  # fmt: skip
        for _ in range(operations):
            self.random.choice(choices)()
        torch.cuda.synchronize()
        total = hashlib.sha256()
        for one in (*self.gpu, *self.host):
            total.update(one.memory.cpu().numpy().tobytes())
        return total.hexdigest()

    def pick(self) -> tuple[Buffer, Buffer, slice, slice]:
        size = self.random.choice([self.random.randrange(1, 4096), self.random.randrange(1, _SIZE)])
        target, source = (self.random.randrange(_SIZE - size + 1) for _ in range(2))
        if self.random.random() < 0.8:
            source = target
        ends = [self.random.choice(self.gpu), self.random.choice(self.host)]
        self.random.shuffle(ends)
        return (
            ends[0], ends[1], slice(target, target + size), slice(source, source + size)
        )  # fmt: skip

    def ordered(self, run: Callable[[], object], *buffers: Buffer) -> None:
        stream = self.random.choice(self.streams)
        with torch.cuda.stream(stream):
            for one in buffers:
                stream.wait_event(one.last)
            run()
            for one in buffers:
                one.last.record(stream)

    def copy(self) -> None:
        target, source, to, at = self.pick()
        if self.host[-1] in (target, source):  # the host may write pageable memory later
            for one in (target, source):
                one.last.synchronize()
        blocks = self.random.random() < 0.2
        self.ordered(
            lambda: target.memory[to].copy_(source.memory[at], non_blocking=not blocks),
            target, source,
        )  # fmt: skip
        if self.host[-1] in (target, source):
            target.last.synchronize()

    def kernel(self) -> None:
        one = self.random.choice(self.gpu)
        factor = 2 * self.random.randrange(64) + 1
        self.ordered(lambda: one.memory.mul_(factor).add_(7), one)

    def copy_now(self) -> None:
        """By the driver, on the legacy default stream."""
        target, source, to, at = self.pick()
        for one in (target, source):
            one.last.synchronize()
        places = [target.memory[to].data_ptr(), source.memory[at].data_ptr()]
        words = [ctypes.c_uint64(place) for place in places]
        assert self.driver.cuMemcpy(*words, ctypes.c_size_t(to.stop - to.start)) == 0

    def graph(self) -> None:
        target, source, to, at = self.pick()
        if self.host[-1] in (target, source) or self.random.random() < 0.8:
            return
        made = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        captured = torch.cuda.graph(made, stream=self.streams[3], capture_error_mode="thread_local")
        with _CAPTURES, captured:
            target.memory[to].copy_(source.memory[at], non_blocking=True)
        self.ordered(lambda: (made.replay(), made.replay()), target, source)
        torch.cuda.synchronize()

    def host_writes(self) -> None:
        one = self.random.choice(self.host)
        one.last.synchronize()
        one.memory[: self.random.randrange(1, 5000)] = self.random.randrange(256)

    def host_function(self) -> None:
        one = self.random.choice(self.host)
        first = ctypes.c_uint8.from_address(one.memory.data_ptr())

        def change(_: int | None) -> None:
            first.value = first.value * 3 + 1

        function = _HOST_FUNCTION(change)
        self.functions.append(function)

        def launch() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            assert self.driver.cuLaunchHostFunc(stream, function, None) == 0

        self.ordered(launch, one)

    def wait(self) -> None:
        self.random.choice(self.streams).synchronize()


def random_work(seed: int, operations: int) -> dict[str, Any]:
    """A thread for each GPU."""
    gpus = torch.cuda.device_count()
    for gpu in range(gpus):  # torch's allocator cannot be set up by two threads at once
        torch.empty(1, device=f"cuda:{gpu}")
    sums = [""] * gpus

    def work(gpu: int) -> None:
        sums[gpu] = RandomWork(gpu, seed * gpus + gpu).run(operations // gpus)

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in range(gpus)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return {"sums": sums, "spread": spread_copies()}


def spread_copies() -> int:
    """How many copies took several links, by the library if there is one."""
    count = getattr(ctypes.CDLL(None), "c2c_multipath_counts", None)
    if count is None:
        return 0
    counts = (ctypes.c_int64 * 27)()
    count(counts)
    return counts[0]


class Layer(nn.Module):
    """The matrices of a layer of Llama 3 8B."""

    def __init__(self, make: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
        shapes += [(14336, 4096), (14336, 4096), (4096, 14336)]
        weights = [nn.Parameter(make(*shape), requires_grad=False) for shape in shapes]
        self.weights = nn.ParameterList(weights)


def model(gigabytes: int) -> dict[str, Any]:
    """Rates of `Module.to`: with allocations, and again, into memory that torch has kept."""

    def pinned(rows: int, columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=torch.bfloat16, pin_memory=True)

    Layer(pinned).to("cuda")  # loads code, and sets up what copies need
    layers: list[Layer] = []
    size = 0
    while size < gigabytes * 1e9:
        layers.append(Layer(pinned))
        for weight in layers[-1].parameters():
            weight.view(torch.int16).fill_(len(layers))
            size += weight.nbytes
    rates: list[float] = []
    right = True
    for _ in range(2):
        copied = nn.ModuleList(_same(one) for one in layers)
        rates.append(size / 1e9 / _timed(partial(copied.to, "cuda")))
        for number, one in enumerate(copied, 1):
            for weight in one.parameters():
                right &= bool((weight.view(torch.int16) == number).all())
    return {"gigabytes": size / 1e9, "gb_per_s": rates, "right": right}


def _same(layer: Layer) -> Layer:
    """Another layer with the same weights."""
    weights = iter(list(layer.parameters()))
    return Layer(lambda rows, columns: next(weights).data)


def sizes() -> dict[str, Any]:
    """One copy at a time, and its end; both ways."""
    rows: list[dict[str, Any]] = []
    for mib in (2, 4, 6, 8, 10, 12, 16, 24, 32, 64, 128, 512):
        host = torch.empty(mib * _MIB, dtype=torch.uint8, pin_memory=True)
        gpu = torch.empty(mib * _MIB, dtype=torch.uint8, device="cuda")
        for what, (target, source) in {"in": (gpu, host), "out": (host, gpu)}.items():
            copy = partial(target.copy_, source, non_blocking=True)
            times = [_timed(copy) for _ in range(12)]
            rows.append({"mib": mib, "what": what, "us": sorted(times[3:])[4] * 1e6})
    return {"rows": rows}


def _timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def small() -> dict[str, Any]:
    """The call alone, by the driver: the least of many batches of 100."""
    driver = ctypes.CDLL("libcuda.so.1")
    host = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(4096, dtype=torch.uint8, device="cuda")
    words = [ctypes.c_uint64(gpu.data_ptr()), ctypes.c_void_p(host.data_ptr())]
    words += [ctypes.c_size_t(4096), ctypes.c_void_p(torch.cuda.Stream().cuda_stream)]
    copy = driver.cuMemcpyHtoDAsync_v2
    least = float("inf")
    for _ in range(300):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            copy(*words)
        least = min(least, (time.perf_counter() - began) / 100)
    return {"us": least * 1e6}


def allocations() -> dict[str, Any]:
    """The driver's, of 64 MiB each."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.empty(64 * _MIB, dtype=torch.uint8, pin_memory=True).to("cuda")
    times: list[float] = []
    made = [ctypes.c_uint64() for _ in range(128)]
    for one in made:
        began = time.perf_counter()
        assert driver.cuMemAlloc_v2(ctypes.byref(one), ctypes.c_size_t(64 * _MIB)) == 0
        times.append(time.perf_counter() - began)
    for one in made:
        assert driver.cuMemFree_v2(one) == 0
    return {"us": sorted(times)[len(times) // 2] * 1e6}


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("kind", ctypes.c_int), ("handles", ctypes.c_int), ("location_kind", ctypes.c_int),
        ("location", ctypes.c_int), ("of_windows", ctypes.c_void_p), ("flags", ctypes.c_uint64),
    ]  # fmt: skip


def mapped() -> dict[str, Any]:
    """As vLLM's sleep mode copies: by the runtime library that torch has loaded, found by
    `ctypes`. The runtime finds out which way a copy goes."""
    size = 256 * _MIB
    host = torch.randint(256, (size,), dtype=torch.uint8).pin_memory()
    back = torch.empty_like(host, pin_memory=True)
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "/libcudart" in line)
    runtime = ctypes.CDLL(path)
    memory, place = ctypes.c_uint64(), ctypes.c_uint64()
    one, zero, length = _Properties(1, 0, 1, 0, None, 0), ctypes.c_uint64(), ctypes.c_size_t(size)
    access = (ctypes.c_int * 3)(1, 0, 3)
    steps = [
        driver.cuMemCreate(ctypes.byref(memory), length, ctypes.byref(one), zero),
        driver.cuMemAddressReserve(ctypes.byref(place), length, ctypes.c_size_t(), zero, zero),
        driver.cuMemMap(place, length, ctypes.c_size_t(), memory, zero),
        driver.cuMemSetAccess(place, length, access, ctypes.c_size_t(1)),
        runtime.cudaMemcpy(place, ctypes.c_void_p(host.data_ptr()), length, 4),
        runtime.cudaMemcpy(ctypes.c_void_p(back.data_ptr()), place, length, 4),
    ]
    return {"steps": steps, "right": bool((host == back).all()), "spread": spread_copies()}


def forked() -> dict[str, Any]:
    """A copy, a child that does nothing with CUDA, and a copy again."""
    host = torch.full((64 * _MIB,), 7, dtype=torch.uint8).pin_memory()
    first = host.to("cuda", non_blocking=True)
    child = os.fork()
    if child == 0:
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    second = host.to("cuda", non_blocking=True)
    return {"child": status, "right": bool((first == 7).all()) and bool((second == 7).all())}


def loop() -> dict[str, Any]:
    host = torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(256 * _MIB, dtype=torch.uint8, device="cuda")
    for turn in range(1_000_000):
        gpu.copy_(host, non_blocking=True)
        host.copy_(gpu, non_blocking=True)
        if turn == 20:
            print("copies", flush=True)
        if turn % 20 == 0:
            torch.cuda.synchronize()
    return {}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "random": random_work, "model": model, "sizes": sizes, "small": small, "forked": forked,
    "loop": loop, "allocations": allocations, "mapped": mapped,
}  # fmt: skip


if __name__ == "__main__":
    result = PARTS[sys.argv[1]](*map(int, sys.argv[2:]))
    print(json.dumps(result), flush=True)
