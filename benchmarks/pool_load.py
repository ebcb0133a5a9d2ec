"""Loading a model into the pool against the plainest copy of the same file, in one run: JSON.

python benchmarks/pool_load.py [--gib N] [--threads N] [--rounds N] [--disk DIR] [--shm DIR]
                               [--out FILE]

The file is in the page cache, so what is measured is this code and memory, not a disk. Peers, all
with the same threads and chunks:

  read        preadv into a buffer that is used again and again: the ceiling, nothing is kept
  map         preadv into a fresh, allocated shared-memory mapping: what must be done at least
  write       pread and pwrite into a fresh, allocated shared-memory file (what `cp` does)

Rounds are interleaved; rates are of the best round, allocation included, and all are listed.
"""

import argparse
import json
import mmap
import os
import struct
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from report import report

from c2cserve.core.tensors import Dtype
from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.layout import GroupPlan, LayoutPlan, Part, TensorPlan
from c2cserve.memory.loader import Loader
from c2cserve.memory.segment import Segment, remove_segment

CHUNK = 8 << 20
LAYERS = 16
ROWS = 4096


def make_plan(size: int, dtype: Dtype) -> LayoutPlan:
    """Layers of two fused tensors of two parts each; `size` bytes in the checkpoint (bfloat16)."""
    columns = size // (2 * LAYERS * 4 * ROWS)
    shape = (ROWS, columns)
    tensors, groups = [], []
    for layer in range(LAYERS):
        parts = []
        for name in ("a", "b"):
            target = f"{layer}.{name}"
            tensors.append(TensorPlan(target, (2 * ROWS, columns), dtype, name == "a"))
            parts += [Part(f"{target}.{i}", shape, target, i * ROWS * columns) for i in range(2)]
        groups.append(GroupPlan(str(layer), tuple(parts)))
    return LayoutPlan(tuple(tensors), tuple(groups))


def write_checkpoint(path: Path, plan: LayoutPlan) -> None:
    header, end = {}, 0
    for part in (part for group in plan.groups for part in group.parts):
        begin, end = end, end + 2 * part.elements
        header[part.source] = {
            "dtype": "BF16", "shape": part.shape, "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        block = os.urandom(CHUNK)
        for begin in range(0, end, CHUNK):
            file.write(block[: end - begin])


def in_parallel(size: int, threads: int, copy: Callable[[int, int, memoryview], object]) -> None:
    """`copy(offset, count, own buffer)` for every chunk."""
    offsets, lock = iter(range(0, size, CHUNK)), threading.Lock()

    def work() -> None:
        own = memoryview(mmap.mmap(-1, CHUNK))
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            copy(offset, min(CHUNK, size - offset), own)

    team = [threading.Thread(target=work) for _ in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()


def peer(kind: str, source: Path, target: Path, threads: int) -> None:
    size = source.stat().st_size
    fd = os.open(source, os.O_RDONLY)
    out = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if kind == "read":
            in_parallel(size, threads, lambda at, n, own: os.preadv(fd, [own[:n]], at))
            return
        os.posix_fallocate(out, 0, size)
        if kind == "map":
            view = memoryview(mmap.mmap(out, size))
            in_parallel(size, threads, lambda at, n, _: os.preadv(fd, [view[at : at + n]], at))
            return

        def through_buffer(at: int, n: int, own: memoryview) -> None:
            os.preadv(fd, [own[:n]], at)
            os.pwrite(out, own[:n], at)

        in_parallel(size, threads, through_buffer)
    finally:
        os.close(fd)
        os.close(out)
        target.unlink()


def load(directory: Path, plan: LayoutPlan, target: Path, threads: int) -> float:
    """Seconds until the first layer was there."""
    begin, first = time.perf_counter(), []
    sources = open_checkpoint(directory, plan)
    segment = Segment.create(target, plan, sources)

    def on_group(_: int) -> None:
        first.append(time.perf_counter() - begin)

    try:
        Loader(segment, plan, sources, threads=threads, on_group=on_group).run()
    finally:
        remove_segment(target)
    return first[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    plan = make_plan(int(options.gib * (1 << 30)), "bfloat16")
    wide = make_plan(int(options.gib * (1 << 30)), "float32")
    took: defaultdict[str, list[float]] = defaultdict(list)
    first: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
        tempfile.TemporaryDirectory(dir=options.shm) as shm,
    ):
        source, target = Path(disk) / "model.safetensors", Path(shm) / "target"
        write_checkpoint(source, plan)
        for _ in range(options.rounds):
            for kind in ("read", "map", "write", "pool", "pool_bf16_to_f32"):
                begin = time.perf_counter()
                if kind == "pool":
                    first.append(load(Path(disk), plan, target, options.threads))
                elif kind == "pool_bf16_to_f32":
                    load(Path(disk), wide, target, options.threads)
                else:
                    peer(kind, source, target, options.threads)
                took[kind].append(time.perf_counter() - begin)
    rate = {kind: plan.bytes / min(times) / 1e9 for kind, times in took.items()}
    results = {
        "bytes": plan.bytes,
        "read_gb_per_s": rate,
        "seconds": took,
        "pool_share_of_map": rate["pool"] / rate["map"],
        "pool_share_of_write": rate["pool"] / rate["write"],
        "first_layer_s": min(first),
        "whole_s": min(took["pool"]),
    }
    report(results, options.out, gib=options.gib, threads=options.threads, rounds=options.rounds)


if __name__ == "__main__":
    main()
