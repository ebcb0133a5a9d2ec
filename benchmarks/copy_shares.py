"""Who waits for whom when plain copies share one GPU's link: streams of one process, and processes.

python benchmarks/copy_shares.py [--repeats 5] [--seconds 0.4] [--out FILE]

One GPU, under a minute. All copies go from pinned host memory to it. Two experiments, each between
two streams of a process and between two processes:

    waits    one side queues copies. When the first of them begins, the other side asks for one copy
             of 256 KiB. How long does that take?
    shares   both sides copy without a pause, some copies each in flight. How much does each get?

Four rules predict the waits. `size` is that of a queued copy, `depth` how many there are, and
`rate` is the link's. The quantum and the slice are those that fit best.

    fifo           the queue of a copy engine, in order     size * depth / rate
    round robin    a quantum of each channel in turn        min(size, quantum) / rate
    time slices    a context has the engine for a while     min(size * depth / rate, slice)
    side by side   engines share the link at once           nothing

The rule whose waits are off by the smallest factor in the mean is the verdict. Shares are given
beside what the rules say of them; stream priorities are tried there. A slice is 9 ms at most. A
round robin whose quantum is larger than all copies takes turns by whole copies.
"""

import argparse
import math
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import report

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGEST = 2 * GIB
PROBE = 256 * KIB
_GATE_S = 0.02
"""Copies are queued behind a kernel of this length, so that they begin together."""
_CLOCK_HERTZ = 2.0e9
_LEAST_S = 20e-6
"""Waits below this count as this: they are the launch's own noise."""
_PRIORITY_HIGH = -1

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Copies of a size: `depth` in flight on each of some streams."""

    size: int
    depth: int
    streams: int = 1
    priority: int = 0

    @property
    def in_flight(self) -> int:
        return self.size * self.depth * self.streams


WAITS = (
    Load(256 * KIB, 512), Load(4 * MIB, 64), Load(4 * MIB, 512), Load(64 * MIB, 4),
    Load(64 * MIB, 64), Load(512 * MIB, 1), Load(512 * MIB, 8), Load(LARGEST, 1),
)  # fmt: skip
SHARES = (
    (Load(64 * MIB, 1), Load(4 * MIB, 4)),
    (Load(64 * MIB, 1), Load(8 * MIB, 8)),
    (Load(64 * MIB, 1), Load(8 * MIB, 4, streams=4)),
    (Load(64 * MIB, 1), Load(64 * MIB, 1)),
    (Load(64 * MIB, 1), Load(64 * MIB, 4)),
    (Load(64 * MIB, 1), Load(LARGEST, 1)),
    (Load(64 * MIB, 2), Load(LARGEST, 2)),
    (Load(4 * MIB, 2), Load(4 * MIB, 16)),
    (Load(4 * MIB, 2), Load(64 * MIB, 2)),
    (Load(256 * KIB, 8), Load(64 * MIB, 2)),
)
"""What each side has in flight; the first side is the one that may starve."""
PRIORITIES = (
    (Load(64 * MIB, 1), Load(8 * MIB, 8, priority=_PRIORITY_HIGH)),
    (Load(64 * MIB, 1, priority=_PRIORITY_HIGH), Load(8 * MIB, 8)),
)


# ---- what the rules say -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wait:
    """A measured wait behind the copies of a load."""

    load: Load
    seconds: float


def judge(waits: Sequence[Wait], bytes_per_s: float) -> Figures:
    """Return for each rule the factor by which its waits are off, in the geometric mean, with the
    quantum and the slice that fit best. The verdict is the rule of the smallest factor."""
    queued = [one.load.size * one.load.depth / bytes_per_s for one in waits]
    quanta = [2**power for power in range(21, 32)]  # smaller ones look like side by side
    slices_s = [1e-4 * 2 ** (power / 2) for power in range(14)]

    def round_robin(quantum: int) -> list[float]:
        return [min(one.load.size, quantum) / bytes_per_s for one in waits]

    def time_slices(slice_s: float) -> list[float]:
        return [min(one, slice_s) for one in queued]

    def off(predicted: Sequence[float]) -> float:
        return _off([one.seconds for one in waits], predicted)

    quantum = min(quanta, key=lambda one: off(round_robin(one)))
    slice_s = min(slices_s, key=lambda one: off(time_slices(one)))
    factors = {
        "fifo": off(queued),
        "round robin": off(round_robin(quantum)),
        "time slices": off(time_slices(slice_s)),
        "side by side": off([0.0] * len(waits)),
    }
    return {
        "off_by": factors, "quantum_bytes": quantum, "slice_s": slice_s,
        "verdict": min(factors, key=lambda name: factors[name]),
    }  # fmt: skip


def _off(found: Sequence[float], predicted: Sequence[float]) -> float:
    ratios = [
        abs(math.log(max(a, _LEAST_S) / max(b, _LEAST_S)))
        for a, b in zip(found, predicted, strict=True)
    ]
    return math.exp(sum(ratios) / len(ratios))


def shares_by_rule(victim: Load, other: Load, quantum: int) -> Figures:
    """Return what share of the link each rule gives the first side."""
    turns = [one.streams * min(one.size, quantum) for one in (victim, other)]
    return {
        "fifo": victim.in_flight / (victim.in_flight + other.in_flight),
        "round robin": turns[0] / sum(turns),
        "time slices": 0.5,
        "side by side": victim.streams / (victim.streams + other.streams),
    }


# ---- copies -------------------------------------------------------------------------------------


class Copies:
    """One side: its memory, and copies into the GPU."""

    def __init__(self) -> None:
        self._host = torch.empty(LARGEST, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(LARGEST, dtype=torch.uint8, device="cuda:0")
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._copy(LARGEST, self._stream(0, 0))
        torch.cuda.synchronize()

    def _stream(self, number: int, priority: int) -> torch.cuda.Stream:
        key = number, priority
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(priority=priority)
        return self._streams[key]

    def _copy(self, size: int, stream: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
        return done

    def one_s(self, size: int) -> float:
        """Return how long a copy takes from its call to its end, as the host sees it."""
        began_s = time.monotonic()
        done = self._copy(size, self._stream(0, 0))
        while not done.query():
            pass
        return time.monotonic() - began_s

    def queue(self, load: Load) -> None:
        """Queue the copies, and return once the first of them may begin."""
        stream = self._stream(1, load.priority)
        with torch.cuda.stream(stream):
            sleep: Callable[[int], None] = vars(torch.cuda)["_sleep"]
            sleep(int(_GATE_S * _CLOCK_HERTZ))
        opened = stream.record_event()
        for _ in range(load.depth):
            self._copy(load.size, stream)
        if opened.query():
            raise RuntimeError(f"{load} was not queued in {_GATE_S} s: the first has begun")
        while not opened.query():
            pass

    def drain(self) -> None:
        torch.cuda.synchronize()

    def rate(self, load: Load, start_s: float, end_s: float) -> float:
        """Copy without a pause; return the bytes per second that ended between these times."""
        done, queues = 0, [deque[torch.cuda.Event]() for _ in range(load.streams)]
        while time.monotonic() < end_s:
            for number, queue in enumerate(queues):
                while len(queue) < load.depth:
                    queue.append(self._copy(load.size, self._stream(2 + number, load.priority)))
            for queue in queues:
                while queue and queue[0].query():
                    queue.popleft()
                    done += load.size if start_s <= time.monotonic() <= end_s else 0
            time.sleep(0)  # the other thread's turn
        self.drain()
        return done / (end_s - start_s)


# ---- two sides ----------------------------------------------------------------------------------


class Streams:
    """The other side is a thread of this process, with streams of its own."""

    name = "two streams"

    def __init__(self) -> None:
        self._copies = Copies()
        self._thread: threading.Thread | None = None
        self._rate = 0.0

    def queue(self, load: Load) -> None:
        self._copies.queue(load)

    def drain(self) -> None:
        self._copies.drain()

    def start(self, load: Load, start_s: float, end_s: float) -> None:
        def run() -> None:
            self._rate = self._copies.rate(load, start_s, end_s)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def rate(self) -> float:
        assert self._thread is not None
        self._thread.join()
        return self._rate

    def close(self) -> None: ...


class Processes:
    """The other side is another process."""

    name = "two processes"

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        self._call("ready")

    def _call(self, *message: object) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()

    def queue(self, load: Load) -> None:
        self._call("queue", load)

    def drain(self) -> None:
        self._call("drain")

    def start(self, load: Load, start_s: float, end_s: float) -> None:
        self._pipe.send(("rate", load, start_s, end_s))

    def rate(self) -> float:
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(("end",))
        self._process.join()


def _serve(pipe: Connection) -> None:
    """Do what the first process asks for. Clocks of processes are the same clock."""
    copies = Copies()
    while True:
        match pipe.recv():
            case ("queue", load):
                pipe.send(copies.queue(load))
            case ("rate", load, start_s, end_s):
                pipe.send(copies.rate(load, start_s, end_s))
            case ("drain" | "ready",):
                pipe.send(copies.drain())
            case _:
                return


Other = Streams | Processes


def measure_waits(own: Copies, other: Other, repeats: int, bytes_per_s: float) -> Figures:
    """Return each wait, less what the copy takes when nothing is queued, and the verdict."""
    own.one_s(PROBE)
    alone_s = median(own.one_s(PROBE) for _ in range(20))
    waits: list[Wait] = []
    for load in WAITS:
        found: list[float] = []
        for _ in range(repeats):
            other.queue(load)
            found.append(own.one_s(PROBE) - alone_s)
            other.drain()
            own.drain()
        waits.append(Wait(load, max(0.0, median(found))))
    rows = [
        {**asdict(one.load), "wait_s": one.seconds,
         "queued_s": one.load.size * one.load.depth / bytes_per_s,
         "one_copy_s": one.load.size / bytes_per_s}
        for one in waits
    ]  # fmt: skip
    return {"probe_alone_s": alone_s, "waits": rows, **judge(waits, bytes_per_s)}


def measure_shares(
    own: Copies, other: Other, pairs: Sequence[tuple[Load, Load]], seconds: float, quantum: int
) -> list[Figures]:
    rows: list[Figures] = []
    for victim, load in pairs:
        start_s = time.monotonic() + 0.1
        other.start(load, start_s, start_s + seconds)
        own_rate = own.rate(victim, start_s, start_s + seconds)
        rates = own_rate, other.rate()
        rows.append(
            {
                "own": asdict(victim), "other": asdict(load), "own_gb_per_s": rates[0] / 1e9,
                "other_gb_per_s": rates[1] / 1e9, "share": rates[0] / max(1.0, sum(rates)),
                "by_rule": shares_by_rule(victim, load, quantum),
            }
        )  # fmt: skip
    return rows


def measure(repeats: int, seconds: float) -> Figures:
    own = Copies()
    bytes_per_s = LARGEST / median(own.one_s(LARGEST) for _ in range(5))
    results: Figures = {"gpu": torch.cuda.get_device_name(0), "link_gb_per_s": bytes_per_s / 1e9}
    for kind in (Streams, Processes):
        other = kind()
        try:
            found = measure_waits(own, other, repeats, bytes_per_s)
            quantum = found["quantum_bytes"]
            found["shares"] = measure_shares(own, other, SHARES, seconds, quantum)
            found["priorities"] = measure_shares(own, other, PRIORITIES, seconds, quantum)
        finally:
            other.close()
        print(f"{other.name}: {found['verdict']}, {found['off_by']}", flush=True)
        results[other.name] = found
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each pair of loads")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("copy_shares: needs a GPU")
    began_s = time.monotonic()
    results = measure(given.repeats, given.seconds)
    results["wall_s"] = time.monotonic() - began_s
    report(results, given.out, repeats=given.repeats, seconds=given.seconds)


if __name__ == "__main__":
    main()
