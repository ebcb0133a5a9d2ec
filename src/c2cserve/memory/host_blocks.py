"""Where blocks of KV lie in host memory.

Blocks of a request have one size and an order. Where the memory has room in one piece, they follow
one another, so a move of thousands of blocks is described by a few runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from c2cserve.memory.extents import Extent, Extents


class CopyRun(NamedTuple):
    """Copies of one size whose places in host memory follow one another."""

    places: Sequence[int]
    """Offsets in the arena."""
    there: int
    """The offset of the first one in host memory."""
    size: int
    """Bytes of each."""


class _Run(NamedTuple):
    """Blocks in one extent, or one block in several."""

    blocks: int
    extents: list[Extent]


class HostBlocks:
    """The blocks of one request. `extents` has the memory, which other requests use as well."""

    def __init__(self, extents: Extents, block_bytes: int) -> None:
        self.count = 0
        self._extents = extents
        self._block_bytes = block_bytes
        self._runs: list[_Run] = []

    def add(self, count: int) -> bool:
        """Take memory for more blocks, at the end. Return False, and take none, if it is short."""
        taken = self._extents.take(count * self._block_bytes)
        if taken is None:
            return False
        self.count += count
        block: list[Extent] = []  # one that ends in a later extent
        missing = 0
        for start, stop in taken:
            if block:
                cut = min(stop, start + missing)
                block.append((start, cut))
                missing -= cut - start
                if missing:
                    continue
                self._runs.append(_Run(1, block))
                block, start = [], cut
            whole = (stop - start) // self._block_bytes
            end = start + whole * self._block_bytes
            if whole:
                self._append(whole, (start, end))
            if end < stop:
                block, missing = [(end, stop)], self._block_bytes - (stop - end)
        return True

    def _append(self, count: int, extent: Extent) -> None:
        if self._runs and len(self._runs[-1].extents) == 1:
            before, [(start, stop)] = self._runs[-1]
            if stop == extent[0]:
                self._runs[-1] = _Run(before + count, [(start, extent[1])])
                return
        self._runs.append(_Run(count, [extent]))

    def keep(self, count: int) -> None:
        """Free all blocks but the first `count`."""
        while self.count > count:
            run = self._runs.pop()
            self.count -= run.blocks
            given = run.extents
            if self.count < count:  # some of the run stay
                [(start, stop)] = given
                middle = start + (count - self.count) * self._block_bytes
                self._runs.append(_Run(count - self.count, [(start, middle)]))
                self.count, given = count, [(middle, stop)]
            self._extents.give(given)

    def copies(self, first: int, places: Sequence[int]) -> list[CopyRun]:
        """Return what blocks from `first` on have to do with blocks at `places` in the arena."""
        found: list[CopyRun] = []
        at = done = 0
        for run in self._runs:
            skip, at = max(0, first - at), at + run.blocks
            if at <= first or done == len(places):
                continue
            if len(run.extents) == 1:
                now = places[done : done + run.blocks - skip]
                there = run.extents[0][0] + skip * self._block_bytes
                found.append(CopyRun(now, there, self._block_bytes))
                done += len(now)
                continue
            place = places[done]
            for start, stop in run.extents:
                found.append(CopyRun((place,), start, stop - start))
                place += stop - start
            done += 1
        return found
