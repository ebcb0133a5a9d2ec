"""Cached prefixes in host memory, block by block (`core.actions.SavePrefix`).

The policy names blocks by numbers, and knows what they are. This module knows where they lie.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from c2cserve.core.actions import (
    BringPrefix,
    Direction,
    DropPrefix,
    Move,
    PrefixAction,
    SavePrefix,
)
from c2cserve.core.events import PrefixMoved
from c2cserve.engine.rotation import Copier
from c2cserve.memory.extents import Extent, Extents, cut
from c2cserve.memory.host_blocks import CopyRun


@dataclass(frozen=True, slots=True)
class _RunningCopy:
    number: int
    direction: Direction
    since_s: float
    done: Callable[[], bool]


@dataclass(slots=True)
class PrefixCounts:
    """Since the start, for `/metrics`."""

    saved_bytes: int = 0
    brought_bytes: int = 0
    bring_s: float = 0.0


@dataclass(slots=True)
class PrefixBlocks:
    """Not thread-safe. `extents` has the memory, which KV of requests uses as well."""

    extents: Extents
    copier: Copier
    clock: Callable[[], float]
    used_bytes: int = 0
    counts: PrefixCounts = field(default_factory=PrefixCounts)
    _blocks: dict[int, list[Extent]] = field(default_factory=dict[int, list[Extent]])
    """Where each block lies, most of them in one piece."""
    _sizes: dict[int, int] = field(default_factory=dict[int, int])
    _moves: list[_RunningCopy] = field(default_factory=list[_RunningCopy])
    _over: list[PrefixMoved] = field(default_factory=list[PrefixMoved])

    def submit(self, action: PrefixAction) -> None:
        """Begin an action. Raises RuntimeError if the policy asks for more room than there is, and
        KeyError for blocks that are not here."""
        match action:
            case SavePrefix(_, size, ids):
                self._take(ids, size)
                self.counts.saved_bytes += len(ids) * size
                self._copy(action, "copy")
            case BringPrefix(_, size, ids):
                self.counts.brought_bytes += len(ids) * size
                self._copy(action, "in")
            case DropPrefix(ids):
                for one in ids:
                    self.extents.give(self._blocks.pop(one))
                    self.used_bytes -= self._sizes.pop(one)

    def _take(self, ids: tuple[int, ...], size: int) -> None:
        taken = self.extents.take(len(ids) * size)
        if taken is None:
            raise RuntimeError(f"no room for {len(ids)} blocks of {size} bytes of a prefix")
        for one, extents in zip(ids, cut(taken, size), strict=True):
            self._blocks[one] = extents
            self._sizes[one] = size
        self.used_bytes += len(ids) * size

    def _copy(self, action: SavePrefix | BringPrefix, direction: Direction) -> None:
        began_s = self.clock()
        done = self.copier(self.runs(action), direction)
        self._moves.append(_RunningCopy(action.move, direction, began_s, done))
        self._refresh()  # what this thread does before it looks again is no part of a copy at once

    def runs(self, action: SavePrefix | BringPrefix | Move) -> list[CopyRun]:
        """Return the copies. Blocks that follow one another on the host are one run. Of a move it
        is its first ones, those that it shares."""
        runs: list[CopyRun] = []
        places: list[int] = []
        blocks = action.blocks[: len(action.ids)] if isinstance(action, Move) else action.blocks
        for one, place in zip(action.ids, blocks, strict=True):
            at = place
            for start, stop in self._blocks[one]:
                size = stop - start
                last = runs[-1] if runs else CopyRun((), -1, 0)
                if last.size == size and last.there + len(places) * size == start:
                    places.append(at)
                else:
                    places = [at]
                    runs.append(CopyRun(places, start, size))
                at += size
        return runs

    def finished(self) -> list[PrefixMoved]:
        """Return the ends of moves since the last call."""
        self._refresh()
        over, self._over = self._over, []
        return over

    def _refresh(self) -> None:
        under_way: list[_RunningCopy] = []
        for move in self._moves:
            if not move.done():
                under_way.append(move)
                continue
            took_s = self.clock() - move.since_s
            self._over.append(PrefixMoved(move.number, took_s))
            if move.direction == "in":
                self.counts.bring_s += took_s
        self._moves = under_way
