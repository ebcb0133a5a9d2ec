"""What users of links get of them, each beside the best that the links did in the same run: JSON.

python benchmarks/transfer_users.py [--gpus N] [--parts rotation,sweep,...] [--gib 1] [--out FILE]

rotation    KV in and out at once, scattered blocks of 2 MiB and 64 KiB, over two large copies
sweep       sizes of micro-tasks and depths of links, in and out, over one copy by CUDA
contention  two engines at once, each for a GPU of its own: the share of each
priority    copies of a GPU's own while it relays for another one, over the same copies alone

The first part needs one GPU, the others need two. `bars` are the ratios that the engine is held
to. The exit status is 1 if one is missed.
"""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import report
from transfers_rig import Rig
from transfers_run import at_once, moved, timed

from c2cserve.core.actions import Move
from c2cserve.engine.rotation import HostKv
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import Segment, pack

_MIB = 1 << 20
_BLOCKS = {"2 MiB": (2 * _MIB, 0.92), "64 KiB": (64 << 10, 0.70)}
"""Bytes, and the bar: rotation over two large copies."""
_TASKS_MIB = (1, 2, 4, 8, 16, 32)
_DEPTHS = (1, 2, 4, 6)
_DEPTH, _TASK_MIB = 4, 4
"""What does not change while the other does."""
_SHARE = 0.45
"""Of the sum: what the slower of two engines has."""
_BESIDE = 1.02
"""Times of own copies beside relays over times alone, at most."""
_OWN_MIB = (256, 512)
_OWN_COPIES = 12
_REPEATS = 5
Rows = list[dict[str, Any]]


class Users:
    """The parts, on a rig. `bars` are filled as parts run."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.bars: Rows = []

    def _hold(self, what: str, value: float, bar: float, *, at_most: bool = False) -> None:
        met = value <= bar if at_most else value >= bar
        self.bars.append({"bar": what, "value": value, "limit": bar, "met": met})
        sign = "at most" if at_most else "at least"
        print(f"{what}: {value:.3f} ({sign} {bar:g}: {'met' if met else 'MISSED'})", flush=True)

    # ---- rotation --------------------------------------------------------------------------------

    def rotation(self, most_links: int = 2, **settings: Any) -> Rows:
        """Every second block of one half of an arena comes in; of the other half, it goes out.
        `settings` are those of the engine."""
        rig, rows = self._rig, list[dict[str, Any]]()
        b, half = rig.buffers, rig.buffers.size // 2 // (4 * _MIB) * (4 * _MIB)
        plain = rig.native([b.inward(size=half), _after(b.outward(size=half), half)])
        plain_rate = half / _best_s(plain)
        for links in sorted({1, min(most_links, rig.gpus)}):
            with rig.opened(links, **settings) as engine:
                for name, (block, bar) in _BLOCKS.items():
                    row = self._rotation(engine, block, half)
                    share = row["gb_per_s"] * 1e9 / (2 * plain_rate)
                    plain_gb = 2 * plain_rate / 1e9
                    rows.append({"block": name, "links": links, **row, "plain_gb_per_s": plain_gb,
                                 "to_plain": share})  # fmt: skip
                    if links == 1:
                        self._hold(f"rotation of {name} to two large copies", share, bar)
        return rows

    def _rotation(self, engine: TransferEngine, block: int, half: int) -> dict[str, Any]:
        b, kv = self._rig.buffers, self._rig.host_kv(engine, self._rig.buffers.size)
        inward = tuple(range(0, half, 2 * block))
        outward = tuple(half + place for place in inward)
        size = len(inward) * block
        arena = self._rig.arena[: 2 * half]
        b.fill(arena)
        before = arena.clone()
        kv.start(Move("in", "out", 0, inward), block)
        _finish(kv, 1)
        best_s, submit_s = float("inf"), 0.0
        for _ in range(_REPEATS):
            for place in inward[:: max(1, len(inward) // 16)]:
                arena[place : place + block] = 0
            self._rig.synchronize()
            begun_s = time.perf_counter()
            kv.start(Move("out", "copy", 0, outward), block)
            kv.start(Move("in", "in", 0, inward, kept=len(inward)), block)
            submitted_s = time.perf_counter() - begun_s
            _finish(kv, 2)
            taken_s = time.perf_counter() - begun_s
            if taken_s < best_s:
                best_s, submit_s = taken_s, submitted_s
        assert torch.equal(arena, before), "blocks came back with other bytes"
        arena[half:] = 0
        kv.start(Move("out", "in", 0, outward), block)
        _finish(kv, 1)
        for place in outward:
            assert torch.equal(arena[place : place + block], before[place : place + block])
        kv.forget("in")
        kv.forget("out")
        arena.copy_(before)
        return {"gb_per_s": 2 * size / 1e9 / best_s, "seconds": best_s, "submit_s": submit_s,
                "blocks_each_way": len(inward)}  # fmt: skip

    # ---- sweeps ----------------------------------------------------------------------------------

    def sweep(self) -> Rows:
        """Both axes of MMA's figure 13 apart: micro-tasks of one size, and depths."""
        rig, rows = self._rig, list[dict[str, Any]]()
        ways = {"in": rig.buffers.inward(), "out": rig.buffers.outward()}
        one = {way: segment.size / _best_s(rig.native([segment])) for way, segment in ways.items()}
        cases = [(mib, _DEPTH) for mib in _TASKS_MIB]
        cases += [(_TASK_MIB, depth) for depth in _DEPTHS if depth != _DEPTH]
        for mib, depth in cases:
            size = mib * _MIB
            with rig.opened(
                min(2, rig.gpus), task_bytes=size, task_bytes_most=size, alone_bytes=size,
                depth=depth,
            ) as engine:  # fmt: skip
                row: dict[str, Any] = {"task_mib": mib, "depth": depth}
                for way, segment in ways.items():
                    rate = segment.size / _best_s(moved(engine, [[segment]]))
                    row |= {f"{way}_gb_per_s": rate / 1e9, f"{way}_to_copy": rate / one[way]}
            rows.append(row)
            print(" ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        return rows

    # ---- sharing ---------------------------------------------------------------------------------

    def contention(self) -> dict[str, Any]:
        """Two engines, which know nothing of each other, bring bytes to a GPU each."""
        rig, b = self._rig, self._rig.buffers
        with rig.opened(rig.gpus) as one, rig.opened(rig.gpus) as other:
            half = b.size // 2 // _MIB * _MIB
            last = rig.gpus - 1
            runs = [moved(one, [[b.inward(0, half)]]), moved(other, [[b.inward(last, half)]])]
            alone = [half / _best_s(run) / 1e9 for run in runs]
            b.clear()
            seconds = [at_once(runs) for _ in range(_REPEATS)]
            b.check_inward(0, half)
            b.check_inward(last, half)
        best = min(seconds, key=max)
        rates = [half / 1e9 / one_s for one_s in best]
        self._hold("slower of two engines, share of the sum", min(rates) / sum(rates), _SHARE)
        return {"gb_per_s_each": rates, "gb_per_s_alone": alone}

    def priority(self) -> Rows:
        """Copies of a neighbour's own while it relays, over CUDA's copies when nothing else moves:
        alone, the engine would bring them over both links."""
        rig, b, rows = self._rig, self._rig.buffers, list[dict[str, Any]]()
        last = rig.gpus - 1
        with rig.opened(rig.gpus) as engine:
            for mib in _OWN_MIB:
                segment = b.inward(last, min(mib * _MIB, b.size))
                own, plain = moved(engine, [[segment]]), rig.native([segment])
                own()
                plain()
                alone: list[float] = []
                beside: list[float] = []
                for _ in range(3):
                    alone += [_timed_s(plain) for _ in range(_OWN_COPIES // 3)]
                    with _load(engine, b.inward(0)):
                        beside += [_timed_s(own) for _ in range(_OWN_COPIES // 3)]
                ratio = median(beside) / median(alone)
                relayed = engine.counts()[f"in{last}"].relayed_bytes
                rows.append({"mib": mib, "alone_s": median(alone), "beside_s": median(beside),
                             "worst_s": max(beside), "ratio": ratio,
                             "relayed_gb": relayed / 1e9})  # fmt: skip
                self._hold(f"own copies of {mib} MiB beside relays", ratio, _BESIDE, at_most=True)
        return rows


def _after(segment: Segment, offset: int) -> Segment:
    return segment._replace(target=segment.target + offset)


def _finish(kv: HostKv, moves: int) -> None:
    while moves:
        moves -= len(kv.finished())


@contextmanager
def _load(engine: TransferEngine, segment: Segment) -> Any:
    """Transfers of a segment, one after another, until the end; at least two at a time."""
    packed, ended = pack([segment]), threading.Event()

    def work() -> None:
        tickets = [engine.submit(packed)]
        while not ended.is_set():
            tickets.append(engine.submit(packed))
            engine.wait(tickets.pop(0), spins=False)
        for ticket in tickets:
            engine.cancel(ticket)
            engine.wait(ticket)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.02)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _timed_s(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def _best_s(run: Callable[[], object]) -> float:
    return timed(run, 0, _REPEATS).seconds


PARTS = ("rotation", "sweep", "contention", "priority")
_ONE_GPU = ("rotation",)


def measure(rig: Rig, parts: Sequence[str]) -> dict[str, Any]:
    users, results = Users(rig), dict[str, Any]()
    for part in parts:
        if rig.gpus > 1 or part in _ONE_GPU:
            begun_s = time.perf_counter()
            results[part] = getattr(users, part)()
            print(f"{part}: {time.perf_counter() - begun_s:.1f} s", flush=True)
    return results | {"bars": users.bars}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1.0, help="of a transfer")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("transfer_users: torch sees no GPU")
    from transfers_gpus import Gpus  # needs CUDA's bindings

    began_s = time.perf_counter()
    rig = Gpus(min(given.gpus, torch.cuda.device_count()), int(given.gib * (1 << 30)))
    results = measure(rig, parts)
    results |= {"gpu": torch.cuda.get_device_name(0), "wall_s": time.perf_counter() - began_s}
    report(results, given.out, gpus=rig.gpus, gib=given.gib, parts=given.parts)
    if not all(bar["met"] for bar in results["bars"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
