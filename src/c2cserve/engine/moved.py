"""Bytes that launches move: what a slice counts, and what of that is a step's."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Counts since the start, or differences of them."""

    streamed: int = 0
    """Bytes of weights, over links."""
    peer: int = 0
    """The part of `streamed` that comes from another GPU's memory."""
    hbm: int = 0
    """Bytes of HBM that hybrid GEMMs read and write. Other GEMMs count none."""

    def __add__(self, other: "MovedBytes") -> "MovedBytes":
        return MovedBytes(
            self.streamed + other.streamed, self.peer + other.peer, self.hbm + other.hbm
        )

    def __sub__(self, other: "MovedBytes") -> "MovedBytes":
        return MovedBytes(
            self.streamed - other.streamed, self.peer - other.peer, self.hbm - other.hbm
        )


NOTHING_MOVED = MovedBytes()


def nothing_moved() -> MovedBytes:
    return NOTHING_MOVED
