"""Measurements of `benchmarks/transfers.py`: buffers with contents that are checked, and times."""

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from host_memory import grow_memory
from torch import Tensor

from c2cserve.kernels.gpu.driver import copy_async, new_stream
from c2cserve.memory.pinning import PinnedRegion
from c2cserve.transfer.engine import Ticket, TransferEngine
from c2cserve.transfer.gpus import open_engine
from c2cserve.transfer.moves import HOST, Segment, pack
from c2cserve.transfer.settings import RelayShape, Settings

_REPEATS = 3
_WORD = 8
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_CHECKED = 32 << 20
"""Words compared at a time."""


class WrongBytes(RuntimeError):
    """A transfer's target has other bytes than its source."""


@dataclass(frozen=True)
class Buffers:
    """Memory for transfers of `size` bytes each way, on the host and on each GPU.

    Word i of a source is a hash of i and of a seed, so that bytes in a wrong place are noticed.
    """

    size: int
    host_source: Tensor
    host_target: Tensor
    gpu: Sequence[Tensor]
    """Of each GPU: a target; the first GPU's source is `gpu_source`."""
    gpu_source: Tensor
    pinned: Sequence[PinnedRegion]

    def inward(self, gpu: int = 0, size: int | None = None, at: int = 0) -> Segment:
        target, source = self.gpu[gpu].data_ptr() + at, self.pinned[0].address + at
        return Segment(target, source, size or self.size, gpu, HOST)

    def outward(self, size: int | None = None, at: int = 0) -> Segment:
        target, source = self.pinned[1].address + at, self.gpu_source.data_ptr() + at
        return Segment(target, source, size or self.size, HOST, 0)

    def shares(self, gpus: int) -> list[Segment]:
        """Both ways at once, all of the host's memory between so many GPUs."""
        share = self.size // gpus // 4096 * 4096
        inward = [
            self.inward(gpu, share)._replace(source=self.pinned[0].address + gpu * share)
            for gpu in range(gpus)
        ]
        outward = [Segment(self.pinned[1].address + gpu * share,
                           self.gpu[gpu].data_ptr() + self.size - share, share, HOST, gpu)
                   for gpu in range(gpus)]  # fmt: skip
        return inward + outward

    def clear(self, size: int | None = None) -> None:
        for one in (*self.gpu, self.host_target):
            one[: size or self.size].zero_()
        _synchronize(len(self.gpu))

    def fill(self, memory: Tensor) -> None:
        """Fill memory with words that are all different."""
        _fill(memory, 2)
        _synchronize(len(self.gpu))

    def check_inward(self, gpu: int = 0, size: int | None = None) -> None:
        _check(self.gpu[gpu][: size or self.size], 0)

    def check_outward(self, size: int | None = None) -> None:
        there = torch.empty_like(self.gpu_source)
        there.copy_(self.host_target)
        _check(there[: size or self.size], 1)

    def check_blocks(self, block: int, size: int) -> None:
        """Compare every second block of both targets with its source; all others are zero."""
        there = torch.empty_like(self.gpu_source[:size])
        there.copy_(self.host_target[:size])
        _check(self.gpu[0][:size], 0, block)
        _check(there, 1, block)


def make_buffers(gpus: int, size: int) -> Buffers:
    grow_memory(2 * size)
    host = [
        torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
                         dtype=torch.uint8)
        for _ in range(2)
    ]  # fmt: skip
    for one in host:
        one.zero_()
    pinned = [PinnedRegion(one.data_ptr(), one.numel()) for one in host]
    there = [torch.zeros(size, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(gpus)]
    source = torch.empty_like(there[0])
    fill_sources(host[0], source)
    _synchronize(gpus)
    return Buffers(size, host[0], host[1], there, source, pinned)


def fill_sources(host: Tensor, source: Tensor) -> None:
    """Fill the host's source and a GPU's, of the same size, with words of two seeds."""
    _fill(source, 0)
    host.copy_(source)
    _fill(source, 1)


def _fill(memory: Tensor, seed: int) -> None:
    for start, words in _words(memory, seed):
        memory.view(torch.int64)[start : start + words.numel()] = words


def _words(like: Tensor, seed: int) -> Generator[tuple[int, Tensor]]:
    count = like.numel() // _WORD
    for start in range(0, count, _CHECKED):
        stop = min(start + _CHECKED, count)
        index = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=like.device)
        yield start, (index + seed * (1 << 40)) * _FACTOR


def _check(data: Tensor, seed: int, block: int = 0) -> None:
    """With a size of `block`, every second block is zero. `_CHECKED` words are an even number of
    blocks."""
    mine = data.view(torch.int64)
    for start, words in _words(data, seed):
        if block:
            words.view(-1, block // _WORD)[1::2] = 0
        if not torch.equal(mine[start : start + words.numel()], words):
            raise WrongBytes(f"in the {_WORD * words.numel()} bytes from {_WORD * start} on")


def _synchronize(gpus: int) -> None:
    if not torch.cuda.is_available():
        return  # a test's memory
    for gpu in range(gpus):
        torch.cuda.synchronize(gpu)


@dataclass(frozen=True)
class Taken:
    seconds: float
    cpu_s: float
    bytes: int

    @property
    def row(self) -> dict[str, float]:
        gb = self.bytes / 1e9
        return {"gb_per_s": gb / self.seconds, "cpu_s_per_gb": self.cpu_s / gb}


def timed(run: Callable[[], object], size: int, repeats: int = _REPEATS) -> Taken:
    """The fastest of some runs, after one that is not counted. CPU seconds are of all threads."""
    run()
    best: Taken | None = None
    for _ in range(repeats):
        cpu_s, began_s = time.process_time(), time.perf_counter()
        run()
        seconds = time.perf_counter() - began_s
        taken = Taken(seconds, time.process_time() - cpu_s, size)
        best = taken if best is None or seconds < best.seconds else best
    assert best is not None
    return best


def at_once(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each of some runs in threads that begin together."""
    start, seconds = threading.Barrier(len(runs)), [0.0] * len(runs)

    def work(place: int) -> None:
        start.wait(60)
        began_s = time.perf_counter()
        runs[place]()
        seconds[place] = time.perf_counter() - began_s

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def native(segments: Sequence[Segment]) -> Callable[[], None]:
    """Copies by CUDA, each on a stream of its own, and a wait for all of them."""
    streams = [
        new_stream(one.target_gpu if one.source_gpu == HOST else one.source_gpu) for one in segments
    ]

    def run() -> None:
        for one, stream in zip(segments, streams, strict=True):
            with torch.cuda.device(stream.device):
                copy_async(one.target, one.source, one.size, stream.cuda_stream)
        for stream in streams:
            stream.synchronize()

    return run


def moved(
    engine: TransferEngine, transfers: Sequence[Sequence[Segment]]
) -> Callable[[], list[Ticket]]:
    """Transfers at once, and a wait for all of them."""
    packed = [pack(one) for one in transfers]

    def run() -> list[Ticket]:
        tickets = [engine.submit(one) for one in packed]
        for ticket in tickets:
            engine.wait(ticket)
        return tickets

    return run


def two_hops(buffers: Buffers, task_bytes: int) -> Callable[[], None]:
    """Half of the bytes by GPU 0's copy engine, half through GPU 1: the relay without a kernel."""
    whole = buffers.inward()
    half = buffers.size // 2 // task_bytes * task_bytes
    return split(whole, half, task_bytes, 1)


def split(whole: Segment, relayed: int, task_bytes: int, neighbour: int) -> Callable[[], None]:
    """Bring the first `relayed` bytes through two buffers on a neighbour, in two pipelined streams,
    and the others by the target's copy engine: shares that nothing changes meanwhile."""
    direct = new_stream(whole.target_gpu)
    streams = [new_stream(neighbour) for _ in range(2)]
    places = [
        torch.empty(task_bytes, dtype=torch.uint8, device=f"cuda:{neighbour}") for _ in streams
    ]

    def run() -> None:
        with torch.cuda.device(whole.target_gpu):
            rest = whole.size - relayed
            copy_async(whole.target + relayed, whole.source + relayed, rest, direct.cuda_stream)
        with torch.cuda.device(neighbour):
            for number, start in enumerate(range(0, relayed, task_bytes)):
                size = min(task_bytes, relayed - start)
                place, stream = places[number % 2].data_ptr(), streams[number % 2].cuda_stream
                copy_async(place, whole.source + start, size, stream)
                copy_async(whole.target + start, place, size, stream)
        for stream in (direct, *streams):
            stream.synchronize()

    return run


@contextlib.contextmanager
def opened(
    gpus: int, *, relay: RelayShape | None = None, own: RelayShape | None = None, **settings: Any
) -> Generator[TransferEngine]:
    """An engine over the first GPUs, which has every transfer in micro-tasks."""
    chosen = Settings(**{"one_path_bytes": 0, **settings})
    engine = open_engine(range(gpus), chosen, relay=relay, own=own)
    try:
        yield engine
    finally:
        engine.close()
