"""KV of requests between a slice's arena and host memory (SuperInfer section 4.3).

The policy says which blocks of which request move when (`core.actions.Move`); this holds what is on
the host and knows where. A block is contiguous on both sides but for what the host has scattered,
so that a move is a few large copies per block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from c2cserve.core.actions import Direction, Move
from c2cserve.memory.extents import Extent, Extents

Copy = tuple[int, int, int]
"""(offset in the arena, offset in host memory, bytes)."""


class Copier(Protocol):
    """Carries copies out, in the background or at once. Returns what says whether they are over."""

    def __call__(self, copies: Sequence[Copy], *, inward: bool) -> Callable[[], bool]: ...


def no_copies(copies: Sequence[Copy], *, inward: bool) -> Callable[[], bool]:
    """Of a slice that has no host memory for KV."""
    return lambda: True


def copies_at_once(arena: Tensor, host: Tensor) -> Copier:
    """For an arena that is in the host's memory too (both: uint8)."""

    def copy(copies: Sequence[Copy], *, inward: bool) -> Callable[[], bool]:
        for place, there, size in copies:
            near, far = arena[place : place + size], host[there : there + size]
            near.copy_(far) if inward else far.copy_(near)
        return lambda: True

    return copy


@dataclass(frozen=True, slots=True)
class _UnderWay:
    move: Move
    done: Callable[[], bool]


@dataclass(slots=True)
class RotationCounts:
    """Bytes moved since the start: for `/metrics`."""

    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(slots=True)
class HostKv:
    """Not thread-safe. One move of a request at a time, as the policy promises."""

    size: int
    """Bytes of host memory."""
    copier: Copier
    counts: RotationCounts = field(default_factory=RotationCounts)
    _blocks: dict[str, list[list[Extent]]] = field(default_factory=dict[str, list[list[Extent]]])
    """Of each request, its first blocks: where they are."""
    _moves: list[_UnderWay] = field(default_factory=list[_UnderWay])
    _extents: Extents = field(init=False)

    def __post_init__(self) -> None:
        self._extents = Extents(self.size)

    @property
    def used_bytes(self) -> int:
        return self.size - self._extents.free_bytes

    def start(self, move: Move, block_bytes: int) -> None:
        """Raises RuntimeError if the policy asks for more than there is."""
        kept = self._blocks.setdefault(move.request_id, [])
        if move.direction != "in":
            # The copy of a block that has grown since is replaced, with all that follow.
            self._give(kept, move.first)
            for _ in move.blocks:
                extents = self._extents.take(block_bytes)
                if extents is None or len(kept) < move.first:
                    raise RuntimeError(f"{move.request_id}: no room, or no blocks before {move}")
                kept.append(extents)
        places = kept[move.first : move.first + len(move.blocks)]
        if len(places) < len(move.blocks):
            raise RuntimeError(f"{move.request_id}: not all of {move} is here")
        copies = [
            (offset + done, start, stop - start)
            for offset, extents in zip(move.blocks, places, strict=True)
            for done, (start, stop) in _running(extents)
        ]
        self._count(move.direction, len(move.blocks) * block_bytes)
        done = self.copier(copies, inward=move.direction == "in")
        self._moves.append(_UnderWay(move, done))

    def finished(self) -> list[Move]:
        """Those that are over since it was last asked."""
        over = [one.move for one in self._moves if one.done()]
        if over:
            self._moves = [one for one in self._moves if one.move not in over]
        for move in over:
            if move.direction == "in":
                self._give(self._blocks[move.request_id], move.kept)
        return over

    def forget(self, request_id: str) -> None:
        """Its copies are not wanted any more; no move of it is under way."""
        self._give(self._blocks.pop(request_id, []), 0)

    def busy(self, request_id: str) -> bool:
        return any(one.move.request_id == request_id for one in self._moves)

    def _give(self, kept: list[list[Extent]], first: int) -> None:
        for extents in kept[first:]:
            self._extents.give(extents)
        del kept[first:]

    def _count(self, direction: Direction, size: int) -> None:
        if direction == "in":
            self.counts.in_bytes += size
        else:
            self.counts.out_bytes += size


def _running(extents: list[Extent]) -> list[tuple[int, Extent]]:
    """With the bytes that are in the extents before each."""
    found: list[tuple[int, Extent]] = []
    done = 0
    for start, stop in extents:
        found.append((done, (start, stop)))
        done += stop - start
    return found
