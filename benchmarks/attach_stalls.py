"""How long a GPU's streams stand still while a model's segment is registered with CUDA.

python benchmarks/attach_stalls.py [--gigabytes 4] [--unwritten] [--work DIR] [--out FILE]

A stream runs one small kernel after another, and the host waits for each. The worst time between
two ends is how long the stream stood still:

    alone      half a second of it, beside nothing
    once       while the whole segment is registered at once
    pieces     while a worker's thread registers it in pieces (`memory.gradual_pinning`)
    back       while the thread takes it back

With --unwritten the segment's pages were never written: the pool's loader comes later.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import report

from c2cserve.engine.gpu.segments import PinnedSegment
from c2cserve.memory.gradual_pinning import PAUSE_S, Pinner
from c2cserve.memory.layout import GroupPlan, LayoutPlan, Part, TensorPlan
from c2cserve.memory.pinning import PinnedRegion, Registrar
from c2cserve.memory.segment import Segment, State, remove_segment

LAYER_BYTES = 100 << 20
"""Layers end at other places than registrations."""
_ALONE_S = 0.5


@dataclass(frozen=True)
class Stall:
    worst_ms: float
    """The longest time between the ends of two kernels."""
    took_s: float
    kernels: int


def big_segment(path: Path, size: int, *, written: bool = True) -> Segment:
    """Make a segment of layers, about `size` bytes together, of which every word has its own value.
    `remove_segment` removes it."""
    elements = LAYER_BYTES // 4
    tensors: list[TensorPlan] = []
    groups: list[GroupPlan] = []
    for layer in range(max(1, size // LAYER_BYTES)):
        name = f"layers.{layer}"
        tensors.append(TensorPlan(name, (2, elements), "bfloat16", starts_layer=True))
        parts = tuple(Part(f"{name}.{i}", (elements,), name, i * elements) for i in range(2))
        groups.append(GroupPlan(name, parts))
    segment = Segment.create(path, LayoutPlan(tuple(tensors), tuple(groups)), {})
    if written:
        for number, place in enumerate(segment.tensors.values()):
            words = np.arange(elements, dtype=np.uint32) + np.uint32(number * elements)
            segment.write(place.offset, memoryview(words.view(np.uint8)))
    segment.state = State.READY
    return segment


def watch(kernel: Callable[[], None], busy: Callable[[], bool]) -> Stall:
    """Run `kernel` to its end, again and again, for as long as it is `busy`."""
    began_s = last_s = time.perf_counter()
    worst_s, kernels = 0.0, 0
    while busy():
        kernel()
        now_s = time.perf_counter()
        worst_s = max(worst_s, now_s - last_s)
        last_s = now_s
        kernels += 1
    return Stall(1e3 * worst_s, last_s - began_s, kernels)


def beside(kernel: Callable[[], None], act: Callable[[], None]) -> Stall:
    """Watch while another thread does `act`."""
    thread = threading.Thread(target=act)
    thread.start()
    stall = watch(kernel, thread.is_alive)
    thread.join()
    return stall


def small_kernel(device: int) -> Callable[[], None]:
    """Return what launches a small kernel on a stream of its own, and waits for its end."""
    import torch

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        word = torch.zeros(1, device=f"cuda:{device}")

    def run() -> None:
        with torch.cuda.stream(stream):
            word.add_(1.0)
        stream.synchronize()

    for _ in range(100):
        run()
    return run


def measure(
    path: Path, size: int, kernel: Callable[[], None], *, written: bool = True,
    registrar: Registrar | None = None, device: int | None = None,
) -> dict[str, Stall]:  # fmt: skip
    """Measure all phases with segments at `path`. `registrar`: CUDA by default."""
    until_s = time.monotonic() + _ALONE_S
    found = {"alone": watch(kernel, lambda: time.monotonic() < until_s)}
    try:
        segment = big_segment(path, size, written=written)
        found["once"] = _at_once(segment, kernel, registrar)
    finally:
        remove_segment(path)
    pinner = Pinner(registrar, device=device)
    try:
        pinned = PinnedSegment(big_segment(path, size, written=written), pinner)
        found["pieces"] = beside(kernel, pinned.region.wait)
        if not pinned.complete:
            raise OSError(pinned.fault)
        pinner.close(pinned.region)
        found["back"] = beside(kernel, pinner.finish)
    finally:
        remove_segment(path)
    return found


def _at_once(segment: Segment, kernel: Callable[[], None], registrar: Registrar | None) -> Stall:
    data, regions = segment.data, list[PinnedRegion]()

    def act() -> None:
        regions.append(PinnedRegion(data.ctypes.data, data.nbytes, registrar))

    stall = beside(kernel, act)
    regions.pop().close()
    return stall


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--unwritten", action="store_true", help="the loader has written no page")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="for the segment")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        found = measure(
            Path(work) / "segment", int(given.gigabytes * 1e9), small_kernel(0),
            written=not given.unwritten, device=0,
        )  # fmt: skip
    results: dict[str, Any] = {
        name: {"worst_ms": one.worst_ms, "took_s": one.took_s, "kernels": one.kernels}
        for name, one in found.items()
    }
    report(
        results, given.out, gigabytes=given.gigabytes, unwritten=given.unwritten, pause_s=PAUSE_S
    )


if __name__ == "__main__":
    main()
