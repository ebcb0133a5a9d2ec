"""This machine's GPUs and their links, for `profiling.paths`."""

import time
from collections.abc import Callable, Sequence

import torch

from c2cserve.kernels.gpu.driver import copy_async, new_stream
from c2cserve.profiling.paths import Way
from c2cserve.transfer.gpus import open_engine
from c2cserve.transfer.moves import HOST, Segment, pack
from c2cserve.transfer.settings import RelayShape, Settings

_BYTES = 256 << 20
_ROOM = 2 * _BYTES
_REPEATS = 3


class GpuPaths:
    """`profiling.paths.PathRig` on CUDA's GPUs. Raises `torch.OutOfMemoryError`."""

    def __init__(self) -> None:
        self.size = _BYTES
        self.gpus = torch.cuda.device_count()
        self.name = torch.cuda.get_device_name(0)
        room = (self.gpus + 1) * _ROOM
        self._host = torch.zeros(room, dtype=torch.uint8, pin_memory=True)
        self._near = [
            torch.zeros(2 * _ROOM, dtype=torch.uint8, device=f"cuda:{gpu}")
            for gpu in range(self.gpus)
        ]
        for gpu in range(self.gpus):
            torch.cuda.synchronize(gpu)

    def copies_s(self, moves: Sequence[tuple[int, Way]]) -> float:
        streams = [new_stream(gpu) for gpu, _ in moves]

        def run() -> None:
            for (gpu, way), stream in zip(moves, streams, strict=True):
                one = self._segment(gpu, way, 0, _BYTES)
                with torch.cuda.device(gpu):
                    copy_async(one.target, one.source, one.size, stream.cuda_stream)
            for stream in streams:
                stream.synchronize()

        return _best_s(run)

    def engine_s(
        self, links: int, ways: Sequence[Way], settings: Settings, *, segment_bytes: int = 0,
        own: RelayShape | None = None,
    ) -> float:  # fmt: skip
        size = segment_bytes or _BYTES
        packed = [  # a gap follows each segment, in both memories
            pack([self._segment(0, way, at, size) for at in range(0, _ROOM, 2 * size)])
            for way in ways
        ]
        engine = open_engine(range(links), settings, own=own)

        def run() -> None:
            tickets = [engine.submit(one) for one in packed]
            for ticket in tickets:
                engine.wait(ticket)

        try:
            return _best_s(run)
        finally:
            engine.close()

    def _segment(self, gpu: int, way: Way, at: int, size: int) -> Segment:
        """Each way has memory of its own. What goes into several GPUs comes from several places:
        else a processor's cache would serve all but the first."""
        near, far = self._near[gpu].data_ptr() + at, self._host.data_ptr() + at
        if way == "in":
            return Segment(near, far + gpu * _ROOM, size, gpu, HOST)
        return Segment(far + self.gpus * _ROOM, near + _ROOM, size, HOST, gpu)


def _best_s(run: Callable[[], None]) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    run()
    seconds: list[float] = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)
