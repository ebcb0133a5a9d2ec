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


@dataclass(slots=True)
class _Held:
    segment: Segment
    region: Region
    users: int = 0


class PinnedSegments:
    """One mapping and one registration of each segment, however many slices of the process use it.
    Thread-safe."""

    def __init__(self, pin: Pin = pin_array, peers: PeerPool | None = None) -> None:
        """`peers`: where copies of them may lie, under their paths' names."""
        self._pin = pin
        self._peers = peers
        self._lock = threading.Lock()
        self._held: dict[Path, _Held] = {}

    def open(self, path: Path) -> Segment:
        """Raises OSError (also where CUDA refuses the memory) or ValueError if it is no segment."""
        with self._lock:
            if path not in self._held:
                segment = Segment.open(path)
                try:
                    region = self._pin(segment.data)
                except PinningError as error:
                    raise OSError(f"{path.name} can not be read by the GPU: {error}") from error
                self._held[path] = _Held(segment, region)
                if self._peers is not None:
                    self._peers.add(path.name, lendable(segment))
            held = self._held[path]
            held.users += 1
            return held.segment

    def close(self, path: Path) -> None:
        """One user less. The last one's work on the GPU that reads it must be over: what reads it
        afterwards faults."""
        with self._lock:
            held = self._held[path]
            held.users -= 1
            if held.users == 0:
                del self._held[path]
                if self._peers is not None:
                    self._peers.remove(path.name)
                held.region.close()

    def close_all(self) -> None:
        """Whoever uses them: the GPU is done, or lost. A registration that outlives its mapping
        stands in the way of the next that gets the same addresses."""
        with self._lock:
            while self._held:
                self._held.popitem()[1].region.close()
