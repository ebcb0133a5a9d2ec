"""The measurements of MMA's section 5.1 on this machine, for a table beside the published ones.

python benchmarks/transfers_published.py [--gpus N] [--parts sizes,...] [--gib 4] [--out FILE]

sizes       one transfer of 1 MiB and more, by CUDA's copy and over all links: figures 8, 14
paths       over the links of 1 to N GPUs, and the processor time of that: figures 9, 12
beside      on a link that plain copies use all the time, and beside another engine: figure 10
balance     with shares that are fixed and with ours, alone and beside plain copies: figure 11
peer        what goes from GPU to GPU while all GPUs take from the host: table 2
chunks      sizes of micro-tasks and depths, transfers of 512 MiB: figure 13

All but `sizes` need two GPUs or more. Every rate is of one run of this command. The engine has its
own settings, unlike in `transfers.py`, so small transfers take one path.
"""

import argparse
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from report import report
from transfer_users import Users
from transfers_rig import Rig
from transfers_run import at_once, moved, timed

from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import Order, Settings

_MIB = 1 << 20
_SIZES_MIB = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_CHUNKED_BYTES = 512 * _MIB
_PLAIN_BYTES = 64 * _MIB
_TASK_BYTES = 4 * _MIB
_REPEATS = 5
_AWHILE_S = 0.5
_ONE_PATH = Settings().one_path_bytes
_ORDERS: tuple[Order, ...] = ("direct", "longest")
Rows = list[dict[str, Any]]


class Published:
    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def sizes(self) -> Rows:
        """GB/s by size, each way."""
        rig, b, rows = self._rig, self._rig.buffers, list[dict[str, Any]]()
        with rig.opened(rig.gpus, one_path_bytes=_ONE_PATH) as engine:
            for mib in _SIZES_MIB:
                size = mib * _MIB
                if size > b.size:
                    break
                for way, segment in (("in", b.inward(size=size)), ("out", b.outward(size))):
                    copy_s = _best_s(rig.native([segment]))
                    ours_s = _best_s(moved(engine, [[segment]]))
                    rows.append({
                        "mib": mib, "what": way, "copy_gb_per_s": size / 1e9 / copy_s,
                        "gb_per_s": size / 1e9 / ours_s, "ratio": copy_s / ours_s,
                    })  # fmt: skip
        return rows

    def paths(self) -> Rows:
        """GB/s and processors by links, each way."""
        rig, b, rows = self._rig, self._rig.buffers, list[dict[str, Any]]()
        for links in range(1, rig.gpus + 1):
            with rig.opened(links, one_path_bytes=_ONE_PATH) as engine:
                for way, segment in (("in", b.inward()), ("out", b.outward())):
                    run = moved(engine, [[segment]])
                    run()
                    cpu_s, begun_s = time.process_time(), time.perf_counter()
                    for _ in range(_REPEATS):
                        run()
                    taken_s = time.perf_counter() - begun_s
                    rows.append({
                        "links": links, "what": way,
                        "gb_per_s": _REPEATS * segment.size / 1e9 / taken_s,
                        "processors": (time.process_time() - cpu_s) / taken_s,
                    })  # fmt: skip
        return rows

    def beside(self) -> dict[str, Any]:
        """Plain copies into GPU 0 without an end, alone and beside the engine's transfers; then two
        engines, each for a GPU of its own."""
        rig, b = self._rig, self._rig.buffers
        found: dict[str, Any] = {}
        with rig.opened(rig.gpus, one_path_bytes=_ONE_PATH) as engine:
            own = moved(engine, [[b.inward()]])
            alone_s = _best_s(own)
            with self._plain_copies() as plain:
                time.sleep(_AWHILE_S)
                plain_alone = plain.rate()
                begun_s = time.perf_counter()
                for _ in range(_REPEATS):
                    own()
                taken_s = time.perf_counter() - begun_s
                found["plain"] = {
                    "plain_alone_gb_per_s": plain_alone, "plain_gb_per_s": plain.rate(),
                    "engine_alone_gb_per_s": b.size / 1e9 / alone_s,
                    "engine_gb_per_s": _REPEATS * b.size / 1e9 / taken_s,
                }  # fmt: skip
        found["engines"] = Users(rig).contention()
        return found

    @contextmanager
    def _plain_copies(self) -> Generator["_Plain"]:
        """Copies from the host into GPU 0's memory, one after another."""
        b = self._rig.buffers
        plain = _Plain(min(_PLAIN_BYTES, b.size))
        run = self._rig.native([b.inward(size=plain.bytes)])

        def work() -> None:
            while not plain.ended.is_set():
                run()
                plain.count += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            plain.rate()
            yield plain
        finally:
            plain.ended.set()
            thread.join()

    def balance(self) -> Rows:
        """Seconds of a transfer over two links."""
        rig, b, rows = self._rig, self._rig.buffers, list[dict[str, Any]]()
        whole = b.inward()
        with rig.opened(2, one_path_bytes=_ONE_PATH) as engine:
            ways = {
                "one copy": rig.native([whole]),
                "1:1": rig.split(whole, whole.size // 2, _TASK_BYTES),
                "1:2": rig.split(whole, whole.size * 2 // 3, _TASK_BYTES),
                "ours": moved(engine, [[whole]]),
            }
            for busy in (False, True):
                for name, run in ways.items():
                    if not busy:
                        rows.append({"way": name, "beside": "nothing", "seconds": _best_s(run)})
                        continue
                    with self._plain_copies():
                        taken_s = _best_s(run)
                    rows.append({"way": name, "beside": "plain copies", "seconds": taken_s})
        return rows

    def peer(self) -> Rows:
        """GB/s from GPU 0 to the last one while nothing else moves, and while every GPU takes from
        the host, by the engine's order."""
        rig, b, rows = self._rig, self._rig.buffers, list[dict[str, Any]]()
        last, half = rig.gpus - 1, b.size // 2 // _MIB * _MIB
        there = Segment(b.gpu[last].data_ptr() + half, b.gpu_source.data_ptr(), half, last, 0)
        copy = rig.native([there])
        rows.append({"order": "none", "gb_per_s": half / 1e9 / _best_s(copy)})
        for order in _ORDERS:
            with rig.opened(rig.gpus, order=order, rest_s=0.0, one_path_bytes=_ONE_PATH) as engine:
                loads = [moved(engine, [[b.inward(gpu, half)]]) for gpu in range(rig.gpus)]
                with _without_end(loads):
                    rate = half / 1e9 / _best_s(copy)
            rows.append({"order": order, "gb_per_s": rate})
        return rows

    def chunks(self) -> Rows:
        return Users(self._rig).sweep()


@dataclass
class _Plain:
    bytes: int
    count: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    _last: tuple[int, float] = (0, 0.0)

    def rate(self) -> float:
        """GB/s since the last call."""
        (count, then_s), now = self._last, (self.count, time.perf_counter())
        self._last = now
        return (now[0] - count) * self.bytes / 1e9 / (now[1] - then_s)


@contextmanager
def _without_end(runs: Sequence[Callable[[], object]]) -> Generator[None]:
    """Each in a thread of its own, again and again."""
    ended = threading.Event()

    def again(run: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            while not ended.is_set():
                run()

        return work

    loads = threading.Thread(target=at_once, args=([again(run) for run in runs],))
    loads.start()
    time.sleep(0.05)
    try:
        yield
    finally:
        ended.set()
        loads.join()


def _best_s(run: Callable[[], object]) -> float:
    return timed(run, 0, _REPEATS).seconds


PARTS = ("sizes", "paths", "beside", "balance", "peer", "chunks")


def measure(make_rig: Callable[[int], Rig], size: int, parts: Sequence[str]) -> dict[str, Any]:
    """Run parts, on a rig whose buffers have `size` bytes, or fewer where a part wants that."""
    rig, results = make_rig(size), dict[str, Any]()
    for part in parts:
        if rig.gpus < 2 and part != "sizes":
            continue
        begun_s = time.perf_counter()
        chosen = rig if part != "chunks" else make_rig(min(size, _CHUNKED_BYTES))
        results[part] = getattr(Published(chosen), part)()
        print(f"{part}: {time.perf_counter() - begun_s:.1f} s", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8, help="at most")
    parser.add_argument("--gib", type=float, default=4.0, help="of the largest transfer")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("transfers_published: torch sees no GPU")
    from transfers_gpus import Gpus  # needs CUDA's bindings

    gpus = min(given.gpus, torch.cuda.device_count())
    results = measure(lambda size: Gpus(gpus, size), int(given.gib * (1 << 30)), parts)
    results["gpu"] = torch.cuda.get_device_name(0)
    report(results, given.out, gpus=gpus, gib=given.gib, parts=given.parts)


if __name__ == "__main__":
    main()
