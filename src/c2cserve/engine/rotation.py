"""KV of requests between a slice's arena and host memory (SuperInfer section 4.3).

The policy decides which blocks of which request move, and when (`core.actions.Move`). This module
knows where KV lies on the host. A block is contiguous in the arena and in a few pieces on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from c2cserve.core.actions import Direction, Move
from c2cserve.memory.extents import Extents
from c2cserve.memory.host_blocks import CopyRun, HostBlocks


class Copier(Protocol):
    """Carries copies out, in the background or at once. Returns a test of whether they are over."""

    def __call__(self, copies: Sequence[CopyRun], direction: Direction) -> Callable[[], bool]: ...


def no_copies(copies: Sequence[CopyRun], direction: Direction) -> Callable[[], bool]:
    """The copier of a slice that has no host memory for KV."""
    return lambda: True


def copies_at_once(arena: Tensor, host: Tensor) -> Copier:
    """Return the copier of an arena that is in host memory too (both are uint8)."""

    def copy(copies: Sequence[CopyRun], direction: Direction) -> Callable[[], bool]:
        for run in copies:
            for number, place in enumerate(run.places):
                there = run.there + number * run.size
                near, far = arena[place : place + run.size], host[there : there + run.size]
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
    _blocks: dict[str, HostBlocks] = field(default_factory=dict[str, HostBlocks])
    """The places of each request's copies, from the first one that is no cached prefix's."""
    _moves: list[_RunningMove] = field(default_factory=list[_RunningMove])
    extents: Extents = field(init=False)
    """All of the memory. Cached prefixes take theirs there too (`engine.prefixes`)."""

    def __post_init__(self) -> None:
        self.extents = Extents(self.size)

    @property
    def used_bytes(self) -> int:
        """Bytes of requests and of cached prefixes."""
        return self.size - self.extents.free_bytes

    def start(self, move: Move, block_bytes: int, prefix: Sequence[CopyRun] = ()) -> None:
        """Begin a move. `prefix`: the copies of blocks that are shared with one. Raises
        RuntimeError if the policy asks for more than there is."""
        name, first = move.request_id, max(0, move.first - move.shared)
        places = move.blocks
        blocks = self._blocks.get(name)
        if blocks is None:
            blocks = self._blocks[name] = HostBlocks(self.extents, block_bytes)
        if move.direction != "in":
            # The copy of a block that has grown since is replaced, with all that follow.
            blocks.keep(first)
            if blocks.count < first or not blocks.add(len(places)):
                raise RuntimeError(f"{name}: no room, or no blocks before {move}")
        else:
            places = places[move.shared :]
        if blocks.count < first + len(places):
            raise RuntimeError(f"{name}: not all of {move} is here")
        copies = [*prefix, *blocks.copies(first, places)]
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
                self._blocks[move.request_id].keep(max(0, move.kept - move.shared))
        return over

    def forget(self, request_id: str) -> None:
        """Free a request's copies. No move of it is under way."""
        if (blocks := self._blocks.pop(request_id, None)) is not None:
            blocks.keep(0)

    def busy(self, request_id: str) -> bool:
        return any(one.move.request_id == request_id for one in self._moves)

    def _count(self, direction: Direction, size: int) -> None:
        if direction == "in":
            self.counts.in_bytes += size
        else:
            self.counts.out_bytes += size
