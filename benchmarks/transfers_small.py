"""Parts `small` and `duplex` of `benchmarks/transfers.py`: blocks of KV in and out at once.

They are carried by the copy engine and by a kernel, and compared with large copies by CUDA in the
same run.

calls      a call of CUDA's for each block
batch      one call for 512 blocks
kernel N   N CTAs of the relay kernel, on the GPU itself, for each direction
in/out     the kernel in one direction only, and the better of the others in the other one

All of them are the engine's direct path with one link, so that what is chosen is what a server has.
Part `duplex` rotates KV as a slice does, by batches and by the best that part `small` has found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transfer_users import Users
from transfers_rig import Rig
from transfers_run import moved, timed

from c2cserve.transfer.moves import Segment
from c2cserve.transfer.settings import RelayShape

_KIB, _MIB = 1 << 10, 1 << 20
BLOCKS_KIB = (64, 128, 256, 512, 1024, 2048, 4096)
CTAS = (1, 2, 4, 8, 16)
BARS = {64: 0.70, 2048: 0.92}
"""By KiB of a block: both ways at once to large copies."""
_SIZE = 512 * _MIB
"""Of memory each way, of which every second block is moved."""
_ALL = 1 << 40
"""A limit that all segments are shorter than."""
_WAYS = ("in", "out", "both")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Method:
    name: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    own: RelayShape | None = None


def _kernel(ctas: int, ways: Sequence[str] = ("in", "out"), batch_bytes: int = _ALL) -> Method:
    settings = {f"kernel_{way}_bytes": _ALL for way in ways} | {"batch_bytes": batch_bytes}
    name = f"kernel {ctas}" + (f", {ways[0]} only" if len(ways) == 1 else "")
    return Method(name, settings, RelayShape(ctas))


CALLS, BATCH = Method("calls", {"batch_bytes": 0}), Method("batch", {"batch_bytes": _ALL})


class SmallBlocks:
    """Measures on a rig. `bars` are filled as parts run."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._size = min(_SIZE, rig.buffers.size) // (8 * _MIB) * (8 * _MIB)
        self.bars: Rows = []
        self._best: Method | None = None

    def small(self) -> dict[str, Any]:
        """Return rates of every method by size of blocks, and the best of each size."""
        large = self._large()
        rows: Rows = []
        best: dict[int, dict[str, Any]] = {}
        for kib in BLOCKS_KIB:
            block = kib * _KIB
            plain = [self._row(kib, one, large) for one in (CALLS, BATCH)]
            kernels = [self._row(kib, _kernel(ctas), large) for ctas in CTAS]
            batch = max(plain, key=lambda row: row["both"])["method"] == BATCH.name
            ctas = CTAS[kernels.index(max(kernels, key=lambda row: row["both"]))]
            mixed = [
                self._row(kib, _kernel(ctas, (way,), _ALL if batch else 0), large)
                for way in ("in", "out")
            ]
            rows += [*plain, *kernels, *mixed]
            best[kib] = max(rows[-len(plain + kernels + mixed) :], key=lambda row: row["both"])
            print(f"{block // _KIB} KiB: best {best[kib]['method']}", flush=True)
            if kib == min(BLOCKS_KIB):
                self._best = _kernel(ctas)
        for kib, bar in BARS.items():
            value = best[kib]["both_to_large"]
            self.bars.append({
                "bar": f"blocks of {kib} KiB both ways, to large copies ({best[kib]['method']})",
                "value": value, "limit": bar, "met": value >= bar,
            })  # fmt: skip
        return {"large_gb_per_s": large, "rows": rows,
                "best": {kib: row["method"] for kib, row in best.items()}}  # fmt: skip

    def duplex(self) -> Rows:
        """Return how KV of a slice rotates with blocks of both bars."""
        rows: Rows = []
        for method in (CALLS, BATCH, self._best or _kernel(4)):
            users = Users(self._rig)
            for row in users.rotation(most_links=1, own=method.own, **method.settings):
                rows.append({"method": method.name, **row})
                print(f"rotation of {row['block']} by {method.name}: {row['gb_per_s']:.1f} GB/s,"
                      f" {row['to_plain']:.3f} of large copies", flush=True)  # fmt: skip
        return rows

    def _large(self) -> dict[str, float]:
        """GB/s of CUDA's copies of half of the memory: as many bytes as the blocks have."""
        b, half = self._rig.buffers, self._size // 2
        ways = {"in": [b.inward(size=half)], "out": [b.outward(half)]}
        ways["both"] = ways["in"] + ways["out"]
        rates = {
            way: timed(self._rig.native(segments), half * len(segments)).row["gb_per_s"]
            for way, segments in ways.items()
        }
        print("large copies, GB/s: " + ", ".join(f"{k} {v:.1f}" for k, v in rates.items()))
        return rates

    def _row(self, kib: int, method: Method, large: dict[str, float]) -> dict[str, Any]:
        """GB/s of each way, and over large copies. The bytes of both ways at once are compared."""
        b, block = self._rig.buffers, kib * _KIB
        places = range(0, self._size, 2 * block)
        inward = [b.inward(size=block, at=at) for at in places]
        outward = [b.outward(block, at) for at in places]
        transfers: dict[str, list[list[Segment]]] = {
            "in": [inward], "out": [outward], "both": [inward, outward],
        }  # fmt: skip
        row: dict[str, Any] = {"kib": kib, "method": method.name}
        with self._rig.opened(1, own=method.own, **method.settings) as engine:
            for way in _WAYS:
                if way == "both":
                    b.clear(self._size)
                size = block * sum(len(one) for one in transfers[way])
                taken = timed(moved(engine, transfers[way]), size)
                row[way] = taken.row["gb_per_s"]
                row[f"{way}_to_large"] = row[way] / large[way]
                row[f"{way}_cpu_s_per_gb"] = taken.row["cpu_s_per_gb"]
            b.check_blocks(block, self._size)
        shares = ", ".join(f"{way} {row[f'{way}_to_large']:.3f}" for way in _WAYS)
        print(f"{kib:5} KiB | {method.name:20} | {shares} | both {row['both']:.1f} GB/s,"
              f" {1e3 * row['both_cpu_s_per_gb']:.1f} ms of a CPU per GB", flush=True)  # fmt: skip
        return row
