"""An allocator for blocks of many sizes in one range of memory, in pieces if need be.

As long as enough bytes are free a block finds room, however they are scattered. It touches no
memory.
"""

from bisect import bisect_left
from collections.abc import Sequence

Extent = tuple[int, int]
"""(start, stop), in bytes."""


def cut(extents: Sequence[Extent], size: int) -> list[list[Extent]]:
    """Return the same bytes in pieces of `size`, of which each is in as few extents as it can be.

    The bytes of all extents are a multiple of it."""
    pieces: list[list[Extent]] = []
    missing = 0
    for start, stop in extents:
        while start < stop:
            if not missing:
                pieces.append([])
                missing = size
            end = min(stop, start + missing)
            pieces[-1].append((start, end))
            missing -= end - start
            start = end
    assert not missing, f"the last piece lacks {missing} bytes"
    return pieces


class Extents:
    def __init__(self, size: int) -> None:
        self.free_bytes = size
        self._free: list[Extent] = [(0, size)] if size else []
        """The free extents, in order. No two touch."""

    def take(self, size: int) -> list[Extent] | None:
        """Return the first `size` free bytes, None if fewer are free."""
        if size > self.free_bytes:
            return None
        self.free_bytes -= size
        taken: list[Extent] = []
        while size:
            start, stop = self._free[0]
            cut = min(stop, start + size)
            taken.append((start, cut))
            size -= cut - start
            if cut < stop:
                self._free[0] = (cut, stop)
            else:
                del self._free[0]
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Give extents back. Raises ValueError for bytes that are free already."""
        for start, stop in extents:
            self._give(start, stop)

    def _give(self, start: int, stop: int) -> None:
        at = bisect_left(self._free, (start, stop))
        before = at > 0 and self._free[at - 1][1] >= start
        after = at < len(self._free) and self._free[at][0] <= stop
        if (before and self._free[at - 1][1] > start) or (after and self._free[at][0] < stop):
            raise ValueError(f"bytes {start} to {stop} are free already")
        self.free_bytes += stop - start
        first = self._free[at - 1][0] if before else start
        last = self._free[at][1] if after else stop
        self._free[at - before : at + after] = [(first, last)]
