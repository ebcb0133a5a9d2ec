"""Segments as GPU slices read them: mapped, and registered with CUDA in pieces beside steps.

begin(path) --> PinnedSegment: mapped     a slice's model: used as its groups become readable
                  | pinner's thread: layers, head, experts, embedding table
open(path)  --> Segment: all registered   another worker that relays
close(path) --> taken back in pieces, and then unmapped
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from c2cserve.engine.gpu.peers import lendable
from c2cserve.engine.weights import WeightsLost
from c2cserve.memory.gradual_pinning import GradualRegion, Pinner
from c2cserve.memory.peer_pool import PeerPool
from c2cserve.memory.pinning import PinningError
from c2cserve.memory.segment import Segment


class SegmentWatcher(Protocol):
    """Learns of segments that transfers may read (`transfer.relay_neighbours`). It never waits."""

    def opened(self, path: str, address: int, size: int) -> None: ...

    def closed(self, path: str) -> None:
        """No transfer reads the segment any more."""
        ...


class PinnedSegment:
    """A segment that is registered, or about to be; the `engine.weights.Readable` of its groups.

    Any thread may use it.
    """

    def __init__(self, segment: Segment, pinner: Pinner) -> None:
        self.segment = segment
        data = segment.data
        base = data.ctypes.data

        def map_pages(address: int, size: int) -> None:  # it has the segment: it stays mapped
            segment.populate(address - base, address - base + size)

        self.region: GradualRegion = pinner.open(base, data.nbytes, map_pages, segment.spans)

    @property
    def complete(self) -> bool:
        return self.region.complete

    @property
    def fault(self) -> str:
        """Why the GPU cannot read all of it; empty while there is nothing wrong."""
        reason = self.region.fault
        return f"{self.segment.path.name} cannot be read by the GPU: {reason}" if reason else ""

    def readable(self, group: int) -> bool:
        if fault := self.fault:
            raise WeightsLost(fault)
        if self.region.closing:  # of a step that was parked when the model was detached
            raise WeightsLost(f"{self.segment.path.name} is not attached any more")
        return self.region.readable(self.segment.spans[group])

    def want(self) -> None:
        self.region.wanted = True


class Registering:
    """A slice's segments of which the GPU cannot read all yet, by model."""

    def __init__(self) -> None:
        self._segments: dict[str, PinnedSegment] = {}

    def add(self, model: str, pinned: PinnedSegment) -> None:
        self._segments[model] = pinned

    def remove(self, model: str) -> None:
        self._segments.pop(model, None)

    def faults(self) -> list[tuple[str, str]]:
        """Return (model, fault) of those that never will be readable, each once. Cheap when there
        are none."""
        found = [(model, one.fault) for model, one in self._segments.items() if one.fault]
        for model in [name for name, one in self._segments.items() if one.fault or one.complete]:
            del self._segments[model]
        return found


@dataclass(slots=True)
class _Held:
    pinned: PinnedSegment
    users: int = 0
    """Slices of this process."""
    lent: int = 0
    """Other processes."""


class PinnedSegments:
    """One mapping and one registration of each segment, shared by all slices of the process.
    Thread-safe."""

    def __init__(
        self, pinner: Pinner | None = None, peers: PeerPool | None = None,
        watcher: SegmentWatcher | None = None,
    ) -> None:  # fmt: skip
        """`peers` may copy the segments; it knows them by the names of their paths."""
        self._pinner = pinner or Pinner()
        self._watcher = watcher
        self._peers = peers
        self._lock = threading.Lock()
        self._held: dict[Path, _Held] = {}

    def begin(self, path: Path, *, lent: bool = False) -> PinnedSegment:
        """Map a segment and begin to register it, or count one more user of it. `lent`: the user is
        another process's, whose bytes this one's GPU relays.

        Raises OSError, and ValueError for a file that is no segment. If CUDA refuses the memory,
        the segment has a `fault` later, and still has to be closed.
        """
        with self._lock:
            if path not in self._held:
                self._held[path] = _Held(PinnedSegment(Segment.open(path), self._pinner))
            held = self._held[path]
            held.lent += lent
            held.users += not lent
            if held.users == 1 and not lent:
                self._begin(path, held.pinned)
            return held.pinned

    def open(self, path: Path, *, lent: bool = False) -> Segment:
        """Do `begin`, and wait until all of the segment is registered. Raises OSError also where
        CUDA refuses the memory; then there is nothing to close."""
        pinned = self.begin(path, lent=lent)
        try:
            pinned.region.wait()
        except PinningError as error:
            self.close(path, lent=lent)
            raise OSError(pinned.fault or str(error)) from error
        return pinned.segment

    def close(self, path: Path, *, lent: bool = False) -> None:
        """Count one user less, and begin to release the segment after the last. The GPU must have
        finished that user's work: a kernel that reads the segment afterwards faults."""
        with self._lock:
            held = self._held[path]
            held.lent -= lent
            held.users -= not lent
            if held.users == 0 and not lent:
                self._end(path)
            if held.users == held.lent == 0:
                del self._held[path]
                self._pinner.close(held.pinned.region)

    # Users of other processes are not told of: two processes would wait for each other's end.

    def _begin(self, path: Path, pinned: PinnedSegment) -> None:
        data = pinned.segment.data
        if self._watcher is not None:
            self._watcher.opened(str(path), data.ctypes.data, data.nbytes)
        if self._peers is not None:
            self._peers.add(path.name, lendable(pinned.segment, lambda: pinned.complete))

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
                self._pinner.close(self._held.popitem()[1].pinned.region)
        self._pinner.finish()
