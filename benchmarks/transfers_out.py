"""Part `out` of `benchmarks/transfers.py`: what bounds two links from one GPU to the host.

1. CUDA's copies out of each GPU, and out of both at once. No relay can be faster than both.
2. A kernel on the second GPU, beside copies of the first one's own that go on all the time: the sum
   of both while both run, over CUDA's two. `near`: it reads its own memory, so that NVLink has no
   part in it. `far`: it reads the first GPU's, as a relay does.
3. The engine with some sizes of micro-tasks and depths.

If 1 is slow, the machine is: the host's memory, or what is between the GPUs and it. If `near` is
slow, writes of kernels are, beside a copy engine's. If only `far` is, NVLink or the source's memory
is. If only 3 is, the engine is.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from relay_launch import RelayLaunch
from transfers_run import Buffers, moved, native, opened, timed

from c2cserve.kernels.gpu.driver import CudaError, copy_async, new_stream
from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import RelayShape

_MIB = 1 << 20
_KERNEL_BYTES = 256 * _MIB
_COPY_BYTES = 8 * _MIB
_TASK_BYTES = 16 * _MIB
_CTAS = (2, 4, 8, 16)
_RINGS_KIB = ((12, 16), (16, 8), (6, 32))
_PLAIN_CTAS = (4, 8, 16, 32)
_REPEATS = 3
_TASKS_MIB = ((4, 16), (8, 32), (16, 64), (2, 8))
_ENGINE_DEPTHS = (4, 8)
_BUDGET_S = 50.0
Launch = Callable[[tuple[int, int, int], int], None]
Rows = list[dict[str, Any]]


class OutTuning:
    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._until_s = time.perf_counter() + _BUDGET_S
        self._copies, self._kernels = new_stream(0), [new_stream(1) for _ in range(2)]
        self._half = buffers.size // 2 // _TASK_BYTES * _TASK_BYTES
        self._both_gb_per_s = 0.0

    def run(self) -> dict[str, Any]:
        """`left_out` are cases that the time did not suffice for."""
        copies = self._native()
        with opened(2):  # which lets the GPUs use each other's memory
            kernels = [
                self._beside(name, source, launch)
                for name, launch in self._launches()
                for source in ("near", "far")
                if time.perf_counter() < self._until_s
            ]
        engine = [
            self._engine(task, depth)
            for task, depth in itertools.product(_TASKS_MIB, _ENGINE_DEPTHS)
            if time.perf_counter() < self._until_s
        ]
        best = max(engine, key=lambda row: row["gb_per_s"], default=None)
        print(f"best: {best}", flush=True)
        return {"copies": copies, "kernels": kernels, "engine": engine, "best": best}

    def _native(self) -> dict[str, float]:
        b, half = self._buffers, self._half
        first = b.outward(half)
        second = Segment(b.outward().target + half, b.gpu[1].data_ptr(), half, -1, 1)
        found = {
            name: timed(native(ones), sum(one.size for one in ones)).row["gb_per_s"]
            for name, ones in (
                ("GPU 0", [first]), ("GPU 1", [second]), ("both", [first, second]),
                ("both, one half", [first, second._replace(target=first.target)]),
            )
        }  # fmt: skip
        self._both_gb_per_s = found["both"]
        print(f"copies out: {found}", flush=True)
        return found

    # ---- kernels beside copies -------------------------------------------------------------------

    def _launches(self) -> list[tuple[str, Launch]]:
        found: list[tuple[str, Launch]] = []
        for (stages, kib), ctas in itertools.product(_RINGS_KIB, _CTAS):
            relays = [RelayLaunch(1, RelayShape(ctas, stages, kib << 10)) for _ in self._kernels]
            found.append((f"bulk, {ctas} CTAs, {stages} x {kib} KiB", self._ring(relays)))
        return [*found, *self._plain()]

    def _ring(self, relays: Sequence[RelayLaunch]) -> Launch:
        by_stream = {
            stream.cuda_stream: relay for stream, relay in zip(self._kernels, relays, strict=True)
        }
        return lambda piece, stream: by_stream[stream].launch([piece], stream)

    def _plain(self) -> list[tuple[str, Launch]]:
        from plain_stores import STORES, PlainCopy

        try:
            return [
                (f"{store}, {ctas} CTAs", PlainCopy(1, ctas, store).launch)
                for store, ctas in itertools.product(STORES, _PLAIN_CTAS)
            ]
        except (CudaError, RuntimeError, ImportError, OSError) as error:
            print(f"no plain stores: {type(error).__name__}: {error}", flush=True)
            return []

    def _beside(self, name: str, source: str, launch: Launch) -> dict[str, Any]:
        b, size = self._buffers, min(_KERNEL_BYTES, self._half)
        start = b.gpu[1].data_ptr() if source == "near" else b.gpu_source.data_ptr() + self._half
        pieces = [
            (b.outward().target + self._half + at, start + at, min(_TASK_BYTES, size - at))
            for at in range(0, size, _TASK_BYTES)
        ]
        alone_s = timed(lambda: self._run(launch, pieces), size, _REPEATS).seconds
        sums: list[float] = []
        kernel_s = float("inf")
        for _ in range(_REPEATS):
            marks = self._fill_copies(3 * alone_s)
            begun_s = time.perf_counter()
            before = sum(mark.query() for mark in marks)
            self._run(launch, pieces)
            seconds = time.perf_counter() - begun_s
            copied = (sum(mark.query() for mark in marks) - before) * _COPY_BYTES
            sums.append((size + copied) / seconds / 1e9)
            kernel_s = min(kernel_s, seconds)
            self._copies.synchronize()
        row = {
            "kernel": name, "source": source, "alone_gb_per_s": size / alone_s / 1e9,
            "beside_gb_per_s": size / kernel_s / 1e9, "sum_gb_per_s": max(sums),
            "to_two_copies": max(sums) / self._both_gb_per_s,
        }  # fmt: skip
        print(" | ".join(f"{v:.4g}" if isinstance(v, float) else v for v in row.values()),
              flush=True)  # fmt: skip
        return row

    def _run(self, launch: Launch, pieces: Sequence[tuple[int, int, int]]) -> None:
        for number, piece in enumerate(pieces):
            launch(piece, self._kernels[number % 2].cuda_stream)
        for stream in self._kernels:
            stream.synchronize()

    def _fill_copies(self, seconds: float) -> list[torch.cuda.Event]:
        """Copies of the first GPU's own that take so long, with a mark after each."""
        b, marks = self._buffers, list[torch.cuda.Event]()
        for number in range(int(seconds * 60e9 / _COPY_BYTES) + 1):
            at = number * _COPY_BYTES % self._half
            with torch.cuda.device(0):
                target, source = b.outward().target + at, b.gpu_source.data_ptr() + at
                copy_async(target, source, _COPY_BYTES, self._copies.cuda_stream)
                mark = torch.cuda.Event()
                mark.record(self._copies)
            marks.append(mark)
        return marks

    # ---- the engine ------------------------------------------------------------------------------

    def _engine(self, task: tuple[int, int], depth: int) -> dict[str, Any]:
        segment, settings = self._buffers.outward(), {"depth": depth}
        settings |= {"task_bytes": task[0] * _MIB, "task_bytes_most": task[1] * _MIB}
        with opened(2, **settings) as engine:
            rate = timed(moved(engine, [[segment]]), segment.size).row["gb_per_s"]
            relayed = engine.counts()["out1"].relayed_bytes
            direct = engine.counts()["out0"].direct_bytes
        row = {
            "task_mib": task, "depth": depth, "gb_per_s": rate,
            "relayed_share": relayed / (relayed + direct),
            "to_two_copies": rate / self._both_gb_per_s,
        }  # fmt: skip
        print(f"engine: {row}", flush=True)
        return row
