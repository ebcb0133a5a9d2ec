"""KV of requests between a slice's arena and host memory (SuperInfer section 4.3).

The policy decides which blocks of which request move, and when (`core.actions.Move`). This module
knows where KV lies on the host. A block is contiguous in the arena and in a few pieces on the host,
so a move is a few large copies per block.
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
    """Carries copies out, in the background or at once. Returns a test of whether they are over."""

    def __call__(self, copies: Sequence[Copy], direction: Direction) -> Callable[[], bool]: ...


def no_copies(copies: Sequence[Copy], direction: Direction) -> Callable[[], bool]:
    """The copier of a slice that has no host memory for KV."""
    return lambda: True


def copies_at_once(arena: Tensor, host: Tensor) -> Copier:
    """Return the copier of an arena that is in host memory too (both are uint8)."""

    def copy(copies: Sequence[Copy], direction: Direction) -> Callable[[], bool]:
        for place, there, size in copies:
            near, far = arena[place : place + size], host[there : there + size]
            near.copy_(far) if direction == "in" else far.copy_(near)
        return lambda: True

    return copy


@dataclass(frozen=True, slots=True)
class _RunningMove:
    move: Move
    done: Callable[[], bool]


@dataclass(slots=True)
class RotationCounts:
    """Bytes moved since the start, for `/metrics`."""

    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(slots=True)
class HostKv:
    """KV on the host. Not thread-safe. A request has one move at a time, as the policy promises."""

    size: int
    """Bytes of host memory."""
    copier: Copier
    counts: RotationCounts = field(default_factory=RotationCounts)
    _blocks: dict[str, list[list[Extent]]] = field(default_factory=dict[str, list[list[Extent]]])
    """The places of each request's first blocks."""
    _moves: list[_RunningMove] = field(default_factory=list[_RunningMove])
    _extents: Extents = field(init=False)

    def __post_init__(self) -> None:
        self._extents = Extents(self.size)

    @property
    def used_bytes(self) -> int:
        return self.size - self._extents.free_bytes

    def start(self, move: Move, block_bytes: int) -> None:
        """Begin a move. Raises RuntimeError if the policy asks for more than there is."""
        blocks = self._blocks.setdefault(move.request_id, [])
        if move.direction != "in":
            # The copy of a block that has grown since is replaced, with all that follow.
            self._give(blocks, move.first)
            for _ in move.blocks:
                extents = self._extents.take(block_bytes)
                if extents is None or len(blocks) < move.first:
                    raise RuntimeError(f"{move.request_id}: no room, or no blocks before {move}")
                blocks.append(extents)
        places = blocks[move.first : move.first + len(move.blocks)]
        if len(places) < len(move.blocks):
            raise RuntimeError(f"{move.request_id}: not all of {move} is here")
        copies = [
            (offset + done, start, stop - start)
            for offset, extents in zip(move.blocks, places, strict=True)
            for done, (start, stop) in _with_offsets(extents)
        ]
        self._count(move.direction, len(move.blocks) * block_bytes)
        done = self.copier(copies, move.direction)
        self._moves.append(_RunningMove(move, done))

    def finished(self) -> list[Move]:
        """Return the moves that ended since the last call."""
        over = [one.move for one in self._moves if one.done()]
        if over:
            self._moves = [one for one in self._moves if one.move not in over]
        for move in over:
            if move.direction == "in":
                self._give(self._blocks[move.request_id], move.kept)
        return over

    def forget(self, request_id: str) -> None:
        """Free a request's copies. No move of it is under way."""
        self._give(self._blocks.pop(request_id, []), 0)

    def busy(self, request_id: str) -> bool:
        return any(one.move.request_id == request_id for one in self._moves)

    def _give(self, blocks: list[list[Extent]], first: int) -> None:
        for extents in blocks[first:]:
            self._extents.give(extents)
        del blocks[first:]

    def _count(self, direction: Direction, size: int) -> None:
        if direction == "in":
            self.counts.in_bytes += size
        else:
            self.counts.out_bytes += size


def _with_offsets(extents: list[Extent]) -> list[tuple[int, Extent]]:
    """Return each extent with its offset in the block: the bytes of the extents before it."""
    found: list[tuple[int, Extent]] = []
    done = 0
    for start, stop in extents:
        found.append((done, (start, stop)))
        done += stop - start
    return found
