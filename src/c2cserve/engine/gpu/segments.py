"""Segments as GPU slices read them: mapped, and registered with CUDA."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from c2cserve.engine.gpu.peers import lendable
from c2cserve.memory.peer_pool import PeerPool
from c2cserve.memory.pinning import PinningError, pin_array
from c2cserve.memory.segment import Segment


class Region(Protocol):
    def close(self) -> None: ...


Pin = Callable[["np.ndarray[Any, np.dtype[np.uint8]]"], Region]


class SegmentWatcher(Protocol):
    """Learns of segments that transfers may read (`transfer.relay_neighbours`). It never waits."""

    def opened(self, path: str, address: int, size: int) -> None: ...

    def closed(self, path: str) -> None:
        """No transfer reads the segment any more."""
        ...


@dataclass(slots=True)
class _Held:
    segment: Segment
    region: Region
    users: int = 0
    """Slices of this process."""
    lent: int = 0
    """Other processes."""


class PinnedSegments:
    """One mapping and one registration of each segment, shared by all slices of the process.
    Thread-safe."""

    def __init__(
        self, pin: Pin = pin_array, peers: PeerPool | None = None,
        watcher: SegmentWatcher | None = None,
    ) -> None:  # fmt: skip
        """`peers` may copy the segments; it knows them by the names of their paths."""
        self._pin = pin
        self._watcher = watcher
        self._peers = peers
        self._lock = threading.Lock()
        self._held: dict[Path, _Held] = {}

    def open(self, path: Path, *, lent: bool = False) -> Segment:
        """Map and register a segment, or count one more user of it. `lent`: the user is another
        process's, whose bytes this one's GPU relays.

        Raises OSError, also where CUDA refuses the memory, and ValueError for a file that is no
        segment.
        """
        with self._lock:
            if path not in self._held:
                segment = Segment.open(path)
                try:
                    region = self._pin(segment.data)
                except PinningError as error:
                    raise OSError(f"{path.name} cannot be read by the GPU: {error}") from error
                self._held[path] = _Held(segment, region)
            held = self._held[path]
            held.lent += lent
            held.users += not lent
            if held.users == 1 and not lent:
                self._begin(path, held.segment)
            return held.segment

    def close(self, path: Path, *, lent: bool = False) -> None:
        """Count one user less, and release the segment after the last. The GPU must have finished
        that user's work: a kernel that reads the segment afterwards faults."""
        with self._lock:
            held = self._held[path]
            held.lent -= lent
            held.users -= not lent
            if held.users == 0 and not lent:
                self._end(path)
            if held.users == held.lent == 0:
                del self._held[path]
                held.region.close()

    # Users of other processes are not told of: two processes would wait for each other's end.

    def _begin(self, path: Path, segment: Segment) -> None:
        if self._watcher is not None:
            self._watcher.opened(str(path), segment.data.ctypes.data, segment.data.nbytes)
        if self._peers is not None:
            self._peers.add(path.name, lendable(segment))

    def _end(self, path: Path) -> None:
        if self._watcher is not None:
            self._watcher.closed(str(path))
        if self._peers is not None:
            self._peers.remove(path.name)

    def close_all(self) -> None:
        """Release all segments, used or not: the GPU is done, or lost. A registration that outlives
        its mapping blocks the next one at the same addresses."""
        with self._lock:
            while self._held:
                self._held.popitem()[1].region.close()
