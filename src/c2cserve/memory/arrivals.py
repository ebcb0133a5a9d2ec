"""Filling a segment with bytes of another pool's segment of the same model and layout.

Tensors lie at the same places in both, because places follow from the layout alone. The manifest
is each machine's own.
"""

import threading
from collections.abc import Callable

from c2cserve.core.tensors import ITEM_BYTES
from c2cserve.memory.layout import GroupPlan, LayoutPlan
from c2cserve.memory.segment import Segment, State


def weights_range(segment: Segment) -> tuple[int, int]:
    """Return where the first tensor begins and where the segment ends, in bytes."""
    return min(place.offset for place in segment.tensors.values()), segment.bytes


class Arrivals:
    """Takes ranges of bytes in any order. A group is ready when all before its end is there.

    A load that ends early leaves the segment as it is: a `Loader` reads the groups that lack."""

    def __init__(
        self, segment: Segment, plan: LayoutPlan, on_group: Callable[[int], None]
    ) -> None:  # fmt: skip
        self.begin, self.end = weights_range(segment)
        self.cancelled = False
        self._segment = segment
        self._on_group = on_group
        self._lock = threading.Lock()
        self._whole_to = self.begin
        """All bytes before this one are there."""
        self._behind_gap: dict[int, int] = {}
        """Ranges behind a gap: begin -> end."""
        ends = [_end(segment, group) for group in plan.groups]
        sizes = [_bytes(segment, group) for group in plan.groups]
        self._due = sorted(
            ((end, index, sizes[index]) for index, end in enumerate(ends)), reverse=True
        )
        """End, group, bytes of it: of groups that are not ready, the next one last."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes, on any thread. Raises OSError."""
        self._segment.write(offset, data)
        with self._lock:
            self._behind_gap[offset] = offset + len(data)
            while (end := self._behind_gap.pop(self._whole_to, None)) is not None:
                self._whole_to = end
            complete: list[int] = []
            while self._due and self._due[-1][0] <= self._whole_to:
                _, group, size = self._due.pop()
                self._segment.add_loaded(size)
                self._segment.set_ready(group)
                complete.append(group)
        for group in complete:
            self._on_group(group)

    def cancel(self) -> None:
        self.cancelled = True

    def finish(self) -> None:
        """Mark the segment as whole."""
        assert not self._due
        self._segment.state = State.READY


def _end(segment: Segment, group: GroupPlan) -> int:
    """Return where the last byte of the group lies."""
    ends = [0]
    for part in group.parts:
        place = segment.tensors[part.target]
        ends.append(place.offset + (part.offset + part.elements) * ITEM_BYTES[place.dtype])
    return max(ends)


def _bytes(segment: Segment, group: GroupPlan) -> int:
    return sum(
        part.elements * ITEM_BYTES[segment.tensors[part.target].dtype] for part in group.parts
    )
