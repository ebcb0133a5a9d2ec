"""What is moved, cut into micro-tasks of a few megabytes that each take one path."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

HOST = -1
"""The number of host memory, where GPUs have theirs."""

Direction = Literal["in", "out", "peer"]
"""in: host to GPU. out: GPU to host. peer: to a GPU from another one, or from itself."""


class Port(NamedTuple):
    """One direction of the link between a GPU and host memory, or between two GPUs."""

    # A tuple, because ports are the keys of everything, and a tuple's hash is quick.

    gpu: int
    direction: Direction
    source: int = HOST
    """The GPU that a `peer` port reads."""

    @property
    def name(self) -> str:
        """A short name, for reports: `in0`, `out3`, `peer1to0`."""
        if self.direction == "peer":
            return f"peer{self.source}to{self.gpu}"
        return f"{self.direction}{self.gpu}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes to copy. Addresses are those that GPUs use."""

    target: int
    source: int
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous bytes to move, and the memories that they are in.

    Host memory is pinned and mapped: `source` or `target` is its address for GPUs.
    """

    target: int
    source: int
    size: int
    target_gpu: int
    """A GPU, or `HOST`."""
    source_gpu: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"a segment has 0 bytes or more, not {self.size}")
        if self.target_gpu == self.source_gpu == HOST:
            raise ValueError("a segment from host memory to host memory takes no link")

    @property
    def port(self) -> Port:
        """The port of the direct path."""
        if self.source_gpu == HOST:
            return Port(self.target_gpu, "in")
        if self.target_gpu == HOST:
            return Port(self.source_gpu, "out")
        return Port(self.target_gpu, "peer", self.source_gpu)


def cut(
    segments: Iterable[Segment], task_bytes: int, pieces_max: int
) -> Iterator[tuple[Port, tuple[Piece, ...]]]:
    """Yield micro-tasks of segments that take one port, in order.

    Each has at most `task_bytes` and `pieces_max` pieces. Long segments are cut, short ones are
    grouped.
    """
    pieces: list[Piece] = []
    room, port = task_bytes, None
    for segment in segments:
        port, at = segment.port, 0
        while at < segment.size:
            size = min(room, segment.size - at)
            pieces.append(Piece(segment.target + at, segment.source + at, size))
            at += size
            room -= size
            if room == 0 or len(pieces) == pieces_max:
                yield port, tuple(pieces)
                pieces.clear()
                room = task_bytes
    if pieces and port is not None:
        yield port, tuple(pieces)


def bytes_of(segments: Sequence[Segment]) -> int:
    return sum(segment.size for segment in segments)
