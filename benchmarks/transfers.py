"""Host to GPU and back over the links of 1 to N GPUs, against CUDA's own copies in the same run.

python benchmarks/transfers.py [--gpus N] [--gib 4] [--parts paths,sizes,...] [--out FILE]

Every transfer's bytes are compared with what its source had. With one GPU, only what has one path
is measured. The result's `bars` are the ratios that the engine is held to. Parts:

native      copies by CUDA
paths       1 to N links
hops        relays of two copies and a buffer
sizes       from which size more paths are faster
segments    many small segments
contention  two engines
fault       a relay that stalls
small       blocks of 64 KiB to 4 MiB both ways at once, by the copy engine and by a kernel
duplex      KV of a slice in and out at once, by batches of copies and by the kernel
tasks       sizes of micro-tasks, depths (only if it is named)
tune        shapes of relay kernels, alone and in the engine (only if it is named)
out         what bounds the way out of a GPU over two links (only if it is named)
"""

import argparse
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from report import report
from transfer_faults import stalling
from transfers_out import OutTuning
from transfers_run import Buffers, at_once, make_buffers, moved, native, opened, timed, two_hops
from transfers_small import SmallBlocks
from transfers_tune import BARS, Tuning

from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import Settings

_MIB = 1 << 20
_SIZES_MIB = (1, 2, 4, 6, 8, 10, 11, 12, 16, 24, 32, 64, 128, 256, 512)
_TASKS_MIB = ((1, 4), (2, 4), (2, 8), (2, 16), (4, 4), (4, 16), (8, 32))
_DEPTHS = (2, 3, 4, 6)
_SMALL_BYTES, _SMALL_COUNT = 64 << 10, 8192
_STALL_AT = 0.1
"""Of the undisturbed time."""
Rows = list[dict[str, Any]]


class Bench:
    def __init__(self, gpus: int, size: int) -> None:
        self.gpus, self.size = gpus, size
        self.buffers: Buffers = make_buffers(gpus, size)
        self._one_link: dict[str, float] = {}

    def native(self) -> Rows:
        """CUDA's copies: of one GPU, both ways at once, of all GPUs at once."""
        b = self.buffers
        inward = [b.inward(gpu) for gpu in range(self.gpus)]
        cases: dict[str, list[Segment]] = {
            "in": inward[:1], "out": [b.outward()], "both": [inward[0], b.outward()],
        }  # fmt: skip
        for n in range(2, self.gpus + 1):
            cases[f"out, {n} GPUs"] = b.shares(n)[n:]
            cases |= {f"in, {n} GPUs": inward[:n], f"both, {n} GPUs": b.shares(n)}
        rows: Rows = []
        for name, segments in cases.items():
            taken = timed(native(segments), sum(one.size for one in segments))
            self._one_link[name] = taken.row["gb_per_s"]
            rows.append({"what": name, **taken.row})
        return rows

    def paths(self) -> Rows:
        """One GPU's transfers over the links of 1 to N GPUs."""
        rows: Rows = []
        for n in range(1, self.gpus + 1):
            with opened(n) as engine:
                for name, segments in self._directions().items():
                    row = self._checked(engine, segments)
                    one = self._one_link.get(name)
                    ratio = row["gb_per_s"] / one if one else None
                    rows.append({"links": n, "what": name, **row, "to_native": ratio})
        return rows

    def _directions(self) -> dict[str, list[Segment]]:
        inward, outward = self.buffers.inward(), self.buffers.outward()
        return {"in": [inward], "out": [outward], "both": [inward, outward]}

    def _checked(self, engine: TransferEngine, segments: Sequence[Segment]) -> dict[str, Any]:
        """Each segment as a transfer, all at once; what arrived is compared."""
        self.buffers.clear()
        run = moved(engine, [[one] for one in segments])
        taken = timed(run, sum(one.size for one in segments))
        self._check(segments)
        links = {
            name: {"direct_gb": one.direct_bytes / 1e9, "relayed_gb": one.relayed_bytes / 1e9}
            for name, one in engine.counts().items()
            if one.tasks
        }
        resent = sum(one.resent for one in engine.counts().values())
        return {**taken.row, "by_link": links, "resent": resent}

    def _check(self, segments: Sequence[Segment]) -> None:
        for one in segments:
            if one.target_gpu >= 0:
                self.buffers.check_inward(one.target_gpu, one.size)
            else:
                self.buffers.check_outward(one.size)

    def sizes(self) -> dict[str, Any]:
        """Time of one transfer, over all links and as one copy; from which size all are faster."""
        rows: Rows = []
        b = self.buffers
        with opened(self.gpus) as many, opened(1, one_path_bytes=1 << 40) as one:
            for mib in _SIZES_MIB:
                size = min(mib * _MIB, self.size)
                for name, segment in (("in", b.inward(size=size)), ("out", b.outward(size=size))):
                    b.clear(size)
                    rows.append({
                        "mib": mib, "what": name,
                        "us_all_links": 1e6 * timed(moved(many, [[segment]]), size, 9).seconds,
                        "us_one_copy": 1e6 * timed(moved(one, [[segment]]), size, 9).seconds,
                        "us_cuda": 1e6 * timed(native([segment]), size, 9).seconds,
                    })  # fmt: skip
                    self._check([segment])
        return {"rows": rows, "break_even_mib": {name: _break_even(rows, name)
                                                 for name in ("in", "out")}}  # fmt: skip

    def tasks(self) -> Rows:
        """Sizes of micro-tasks, and depths."""
        cases = [(least, most, 4) for least, most in _TASKS_MIB]
        cases += [(2, 8, depth) for depth in _DEPTHS if depth != 4]
        return [
            {"task_mib": least, "task_mib_most": most, "depth": depth, "what": name, **row}
            for least, most, depth in cases
            for name, row in self._with(
                task_bytes=least * _MIB, task_bytes_most=most * _MIB, depth=depth
            ).items()
        ]

    def tune(self) -> dict[str, Any]:
        """Shapes of relay kernels, sizes of micro-tasks and depths, on two GPUs."""
        if not self._one_link:
            self.native()
        return Tuning(self.buffers, self._one_link).run()

    def out(self) -> dict[str, Any]:
        """Copies, kernels beside copies, and the engine, from a GPU to the host."""
        return OutTuning(self.buffers).run()

    @cached_property
    def small_blocks(self) -> SmallBlocks:
        from transfers_gpus import Gpus  # needs CUDA's bindings

        return SmallBlocks(Gpus(self.gpus, self.size, self.buffers))

    def small(self) -> dict[str, Any]:
        """Blocks both ways at once, by each way to describe them to the GPU."""
        return self.small_blocks.small() | {"bars": self.small_blocks.bars}

    def duplex(self) -> Rows:
        """Rotation of KV, by what part `small` has found."""
        return self.small_blocks.duplex()

    def _with(self, **settings: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        with opened(self.gpus, **settings) as engine:
            for name, segments in list(self._directions().items())[:2]:
                found[name] = self._checked(engine, segments)
        return {name: {k: row[k] for k in ("gb_per_s", "cpu_s_per_gb")}
                for name, row in found.items()}  # fmt: skip

    def hops(self) -> Rows:
        """The other relay, for comparison with `paths` of two links: a copy to a buffer on the
        neighbour and one from there, half of the bytes, planned beforehand."""
        rows: Rows = []
        for mib in (2, 4, 8):
            self.buffers.clear()
            taken = timed(two_hops(self.buffers, mib * _MIB), self.size)
            self.buffers.check_inward()
            rows.append({"task_mib": mib, **taken.row})
        return rows

    def segments(self) -> Rows:
        """Many segments of 64 KiB, each to a place of its own, in reverse order."""
        count = min(_SMALL_COUNT, self.size // _SMALL_BYTES)
        b = self.buffers
        places = [at * _SMALL_BYTES for at in reversed(range(count))]
        cases = {
            "in": [b.inward(size=_SMALL_BYTES, at=at) for at in places],
            "out": [b.outward(size=_SMALL_BYTES, at=at) for at in places],
        }
        size, rows = count * _SMALL_BYTES, list[dict[str, Any]]()
        for n in sorted({1, self.gpus}):
            with opened(n) as engine:
                for name, segments in cases.items():
                    b.clear(size)
                    taken = timed(moved(engine, [segments]), size)
                    self._check([b.inward(size=size) if name == "in" else b.outward(size)])
                    rows.append({"links": n, "what": name, **taken.row})
        return rows

    def contention(self) -> dict[str, Any]:
        """Two engines, which know nothing of each other, each for a GPU of its own."""
        b, half = self.buffers, self.size // 2 // _MIB * _MIB
        with opened(self.gpus) as one, opened(self.gpus) as other:
            runs = [
                moved(one, [[b.inward(0, half)]]),
                moved(other, [[b.inward(self.gpus - 1, half)]]),
            ]
            at_once(runs)
            b.clear()
            began_s = time.perf_counter()
            seconds = at_once(runs)
            whole_s = time.perf_counter() - began_s
            b.check_inward(0, half)
            b.check_inward(self.gpus - 1, half)
        each = [half / 1e9 / one_s for one_s in seconds]
        return {"gb_per_s_each": each, "gb_per_s": 2 * half / 1e9 / whole_s}

    def fault(self) -> dict[str, Any]:
        """A neighbour's relays stall in the middle, and never go on during the transfer."""
        b = self.buffers
        with opened(self.gpus) as engine:
            run = moved(engine, [[b.inward()]])
            alone = timed(run, self.size)
            b.clear()
            with stalling(engine, self.gpus - 1) as stall:
                began_s = time.perf_counter()
                ticket = engine.submit([b.inward()])
                time.sleep(_STALL_AT * alone.seconds)
                stall()
                engine.wait(ticket)
                seconds = time.perf_counter() - began_s
                b.check_inward()
                b.gpu[0].fill_(7)
                torch.cuda.synchronize(0)
            torch.cuda.synchronize(self.gpus - 1)
            late = not bool((b.gpu[0] == 7).all())
            counts = engine.counts()[f"in{self.gpus - 1}"]
        return {
            "undisturbed_s": alone.seconds, "stalled_s": seconds, "resent": counts.resent,
            "stalls": counts.stalls, "stall_limit_s": Settings().stall_s,
            "late_writes": late, "met": not late and counts.resent > 0,
        }  # fmt: skip


def bars(results: dict[str, Any], gpus: int) -> Rows:
    """What the engine is held to, with the parts that were measured. Ratios are within the run."""
    native = {row["what"]: row["gb_per_s"] for row in results.get("native", ())}
    paths = {(row["links"], row["what"]): row for row in results.get("paths", ())}
    rows: Rows = []

    def hold(what: str, value: float | None, limit: float, *, at_most: bool = False) -> None:
        met = value is not None and (value <= limit if at_most else value >= limit)
        rows.append({"bar": what, "value": value, "limit": limit, "met": met})

    for what, one, two in (("in", 0.99, BARS["in"]), ("out", 0.99, BARS["out"])):
        if native and (1, what) in paths:
            hold(f"{what}: one link to one copy", paths[1, what]["gb_per_s"] / native[what], one)
        if native and (2, what) in paths:
            hold(f"{what}: two links to one copy", paths[2, what]["gb_per_s"] / native[what], two)
    if native and (2, "both") in paths:
        for what in ("in", "out"):
            if (2, what) in paths:
                ratio = paths[2, what]["gb_per_s"] / native[f"{what}, 2 GPUs"]
                rows.append({"bar": f"{what}: two links to copies of two GPUs", "value": ratio})
        both = paths[2, "both"]["gb_per_s"] / native["both, 2 GPUs"]
        hold("both ways: two links to copies of two GPUs", both, BARS["both"])
    for what, mib in results.get("sizes", {}).get("break_even_mib", {}).items():
        hold(f"{what}: break-even, MB", mib and mib * _MIB / 1e6, 12.0, at_most=True)
    rows += results.get("small", {}).get("bars", ())
    for (links, what), row in paths.items():
        if links == gpus:
            rows.append({"bar": f"{what}: CPU s for each GB", "value": row["cpu_s_per_gb"]})
    return rows


def _break_even(rows: Rows, name: str) -> int | None:
    """The size from which on all links are faster than one copy."""
    found: int | None = None
    for row in rows:
        if row["what"] == name:
            faster = row["us_all_links"] < min(row["us_one_copy"], row["us_cuda"])
            found = (found or row["mib"]) if faster else None
    return found


_ONE_GPU = ("native", "paths", "segments", "small", "duplex", "tasks")
_PARTS = (
    "native", "paths", "hops", "sizes", "segments", "contention", "fault", "small", "duplex",
)  # fmt: skip
_MORE_PARTS = ("tasks", "tune", "out")


def main() -> None:
    given = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("transfers: torch sees no GPU")
    gpus = min(given.gpus or torch.cuda.device_count(), torch.cuda.device_count())
    began_s = time.perf_counter()
    bench = Bench(gpus, int(given.gib * (1 << 30)) // _MIB * _MIB)
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0), "gpus": gpus, "bytes": bench.size,
        "setup_s": time.perf_counter() - began_s,
    }  # fmt: skip
    for part in given.parts:
        if gpus > 1 or part in _ONE_GPU:
            part_s = time.perf_counter()
            results[part] = getattr(bench, part)()
            print(f"{part}: {time.perf_counter() - part_s:.1f} s", flush=True)
    results["bars"] = bars(results, gpus)
    results["wall_s"] = time.perf_counter() - began_s
    report(results, given.out, gpus=gpus, gib=given.gib, parts=",".join(given.parts))
    for row in results["bars"]:
        limit = f", bar {row['limit']:g}: {row['met']}" if "limit" in row else ""
        print(f"{row['bar']}: {row['value']:.4g}{limit}" if row["value"] else row, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--gib", type=float, default=4.0, help="of every transfer")
    parser.add_argument("--parts", default=",".join(_PARTS), help="with commas between")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    given.parts = given.parts.split(",")
    if unknown := set(given.parts) - {*_PARTS, *_MORE_PARTS}:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return given


if __name__ == "__main__":
    main()
