"""How the level `amx` cuts products of more than 32 rows. All ways give the same bits."""

import struct
from dataclasses import astuple, dataclass

_RECORD = struct.Struct("=7q")
_GROUP_MAX = 8


@dataclass(frozen=True, slots=True)
class ManyRows:
    """`ManyRows` of tiles/ways.h. A chunk of a strip of w meets all pairs of x's tiles, or a chunk
    of a pair meets a group of strips.

    depth      columns of a chunk at most, in steps of 32
    group      strips that a pair meets in turn
    panel      strips that share a chunk of x: whole groups
    prefetch_x    steps by which x is announced to the first-level cache, or 0
    prefetch_w    the same of w
    in_place   w is read where it lies, unless its rows would share lines of that cache
    ranges     shares of the outputs per thread, at most
    """

    depth: int = 64
    group: int = 1
    panel: int = 8
    prefetch_x: int = 0
    prefetch_w: int = 0
    in_place: bool = False
    ranges: int = 4

    def __post_init__(self) -> None:
        if (
            min(self.depth, self.group, self.panel, self.ranges) < 1
            or min(self.prefetch_x, self.prefetch_w) < 0
            or self.group > _GROUP_MAX
            or self.panel % self.group
        ):
            raise ValueError(f"not a way of many rows: {self}")

    def record(self) -> bytes:
        return _RECORD.pack(*map(int, astuple(self)))


MANY_ROWS: dict[str, ManyRows] = {
    "chunks": ManyRows(),
    "ranges1": ManyRows(ranges=1),
    "ranges2": ManyRows(ranges=2),
    "x1": ManyRows(prefetch_x=1),
    "x2": ManyRows(prefetch_x=2),
    "x2w2": ManyRows(prefetch_x=2, prefetch_w=2),
    "x4w4": ManyRows(prefetch_x=4, prefetch_w=4),
    "place": ManyRows(in_place=True),
    "place/x2w2": ManyRows(prefetch_x=2, prefetch_w=2, in_place=True),
    "strip192": ManyRows(depth=6, panel=1),
    "strip256": ManyRows(depth=8, panel=1),
    "strip384": ManyRows(depth=12, panel=1),
    "strip512": ManyRows(depth=16, panel=1),
    "strip256/x2": ManyRows(depth=8, panel=1, prefetch_x=2),
    "strip384/x2": ManyRows(depth=12, panel=1, prefetch_x=2),
    "strip384/x2/panel8": ManyRows(depth=12, prefetch_x=2),
    "strip256/x2/place": ManyRows(depth=8, panel=1, prefetch_x=2, in_place=True),
    "strip384/x2/place": ManyRows(depth=12, panel=1, prefetch_x=2, in_place=True),
    "pair256": ManyRows(depth=8, group=8),
    "pair384": ManyRows(depth=12, group=8),
    "pair256/w2": ManyRows(depth=8, group=8, prefetch_w=2),
    "pair384/w2": ManyRows(depth=12, group=8, prefetch_w=2),
    "pair512/w2": ManyRows(depth=16, group=8, prefetch_w=2),
    "pair384/w2/x2": ManyRows(depth=12, group=8, prefetch_x=2, prefetch_w=2),
}
"""Those that benchmarks and tests compare. `chunks` is the default. "strip" or "pair" says which
operand's chunk stays in the first-level cache, with so many columns."""
