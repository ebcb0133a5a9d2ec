"""Part `tune` of `benchmarks/transfers.py`: where the time of relays goes, and what is fastest.

1. The kernel alone, on the second GPU for the first one, with no direct copy beside it:
   - whole: one launch for all bytes. This is the rate of the kernel's body.
   - tasks of 8 and of 2 MiB, in two streams: what launches cost, the engine's work left out.
2. The same in memory that CUDA allocated, in place of memory that was registered with it: pages.
3. The engine with the fastest kernels, for sizes of micro-tasks and depths, against the bars.

What is slow in 1 is the kernel; in 1 with tasks only, the launches; in 3 only, the engine. Rows are
printed as they come, so that they are there if a later one fails.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from relay_launch import RelayLaunch
from transfers_run import Buffers, moved, opened, timed

from c2cserve.kernels.gpu.driver import new_stream
from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import RelayShape

_MIB = 1 << 20
_ALONE_BYTES = 256 * _MIB
_FORMS_MIB = {"whole": 256, "8 MiB": 8, "2 MiB": 2}
_RING_CTAS = (1, 2, 4, 8)
_RINGS_KIB = ((4, 16), (8, 16), (12, 16), (8, 8), (16, 8), (6, 32), (16, 4))
_LOOKS_KIB = (16, 64, 1 << 20)
"""Other than the default: as often as there are stages, and never."""
_TASKS_MIB = ((2, 8), (4, 16), (8, 32))
_DEPTHS = (4, 6)
_TRIED_IN_ENGINE = 3
_BUDGET_S = 80.0
BARS = {"in": 1.87, "out": 1.85, "both": 0.93}
"""Two links to one copy, and both ways to CUDA's copies with two GPUs."""
LOOK_BYTES = RelayShape().recall_poll_bytes
Rows = list[dict[str, Any]]


def shapes() -> Iterator[RelayShape]:
    """What needs the least of the hardware comes first."""
    for kib in _LOOKS_KIB:
        yield RelayShape(recall_poll_bytes=kib << 10)
    for (stages, kib), ctas in itertools.product(_RINGS_KIB, _RING_CTAS):
        yield RelayShape(ctas, stages, kib << 10)


class Tuning:
    def __init__(self, buffers: Buffers, native: dict[str, float]) -> None:
        """`native` are the rates of CUDA's copies, in GB/s."""
        self.buffers, self.native = buffers, native
        self._until_s = time.perf_counter() + _BUDGET_S
        self._streams = [new_stream(1) for _ in range(2)]

    def run(self) -> dict[str, Any]:
        """Measure everything. `left_out` are cases that the time did not suffice for."""
        kernel = [self._kernel(shape) for shape in shapes()]
        fastest = sorted(kernel, key=_in_tasks, reverse=True)[:_TRIED_IN_ENGINE]
        # What looks more rarely than is safe is there to be compared with, not to be chosen.
        chosen = list(dict.fromkeys(
            replace(RelayShape(**row["shape"]), recall_poll_bytes=LOOK_BYTES) for row in fastest
        ))  # fmt: skip
        if RelayShape() not in chosen:
            chosen.append(RelayShape())
        memory = [self._allocated(shape) for shape in chosen]
        engine: Rows = []
        left_out = 0
        for depth, task, shape in itertools.product(_DEPTHS, _TASKS_MIB, chosen):
            if time.perf_counter() > self._until_s:
                left_out += 1
                continue
            engine.append(self._engine(shape, task, depth))
        best = max(engine, key=lambda row: row["to_bar"]) if engine else None
        if best is not None:
            _show("best", best)
            self._check_engine(best)
        return {"kernel": kernel, "allocated": memory, "engine": engine, "best": best,
                "left_out": left_out}  # fmt: skip

    # ---- the kernel alone ------------------------------------------------------------------------

    def _kernel(self, shape: RelayShape) -> dict[str, Any]:
        b, size = self.buffers, min(_ALONE_BYTES, self.buffers.size)
        row: dict[str, Any] = {"shape": asdict(shape)}
        b.clear(size)
        for way, segment in (("in", b.inward(size=size)), ("out", b.outward(size=size))):
            row |= self._forms(shape, way, segment)
        b.check_inward(size=size)
        b.check_outward(size)
        _show("kernel", row)
        return row

    def _allocated(self, shape: RelayShape) -> dict[str, Any]:
        size = min(_ALONE_BYTES, self.buffers.size)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = self.buffers.gpu[0].data_ptr(), self.buffers.gpu_source.data_ptr()
        row: dict[str, Any] = {"shape": asdict(shape)}
        for way, segment in (
            ("in", Segment(there[0], host.data_ptr(), size, 0, -1)),
            ("out", Segment(host.data_ptr(), there[1], size, -1, 0)),
        ):
            row |= self._forms(shape, way, segment)
        _show("allocated", row)
        return row

    def _forms(self, shape: RelayShape, way: str, segment: Segment) -> dict[str, float]:
        found: dict[str, float] = {}
        # A flag is of the launches of one stream: two may run at a time.
        relays = [RelayLaunch(1, shape) for _ in self._streams]
        for form, mib in _FORMS_MIB.items():
            run = self._launches(relays, segment, min(mib * _MIB, segment.size))
            found[f"{way}, {form}"] = timed(run, segment.size).row["gb_per_s"]
        return found

    def _launches(
        self, relays: Sequence[RelayLaunch], one: Segment, task_bytes: int
    ) -> Callable[[], None]:
        def run() -> None:
            for number, at in enumerate(range(0, one.size, task_bytes)):
                lane, size = number % len(relays), min(task_bytes, one.size - at)
                piece = (one.target + at, one.source + at, size)
                relays[lane].launch([piece], self._streams[lane].cuda_stream)
            for stream in self._streams:
                stream.synchronize()

        return run

    # ---- the engine ------------------------------------------------------------------------------

    def _directions(self) -> dict[str, Sequence[Segment]]:
        inward, outward = self.buffers.inward(), self.buffers.outward()
        return {"in": [inward], "out": [outward], "both": [inward, outward]}

    def _engine(self, shape: RelayShape, task: tuple[int, int], depth: int) -> dict[str, Any]:
        row: dict[str, Any] = {"shape": asdict(shape), "task_mib": task, "depth": depth}
        with opened(2, relay=shape, **_settings(task, depth)) as engine:
            for name, segments in self._directions().items():
                run = moved(engine, [[one] for one in segments])
                row[name] = timed(run, sum(one.size for one in segments)).row["gb_per_s"]
            counts = engine.counts().values()
            row["resent"] = sum(one.resent for one in counts)
            row["relayed_share"] = sum(one.relayed_bytes for one in counts) / sum(
                one.relayed_bytes + one.direct_bytes for one in counts
            )
        row["to_bar"] = min(row[name] / self._native(name) / bar for name, bar in BARS.items())
        _show("engine", row)
        return row

    def _native(self, name: str) -> float:
        return self.native["both, 2 GPUs" if name == "both" else name]

    def _check_engine(self, row: dict[str, Any]) -> None:
        self.buffers.clear()
        shape, settings = RelayShape(**row["shape"]), _settings(row["task_mib"], row["depth"])
        with opened(2, relay=shape, **settings) as engine:
            moved(engine, [[one] for one in self._directions()["both"]])()
        self.buffers.check_inward()
        self.buffers.check_outward()


def _settings(task: tuple[int, int], depth: int) -> dict[str, int]:
    return {"task_bytes": task[0] * _MIB, "task_bytes_most": task[1] * _MIB, "depth": depth}


def _in_tasks(row: dict[str, Any]) -> float:
    return min(row["in, 8 MiB"], row["out, 8 MiB"])


def _show(table: str, row: dict[str, Any]) -> None:
    shape = row["shape"]
    ring = f"{shape['stages']} x {shape['stage_bytes'] >> 10} KiB"
    cells = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
             for k, v in row.items() if k != "shape"]  # fmt: skip
    look = f"look {shape['recall_poll_bytes'] >> 10} KiB"
    print(
        f"{table:9s} {shape['ctas']:2d} CTAs {ring:11s} {look} | " + " | ".join(cells), flush=True
    )
