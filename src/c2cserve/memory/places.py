"""An allocator of places in a range of memory: first fit, at multiples of 256 bytes.

It touches no memory.
"""

from bisect import insort

_ALIGNMENT = 256


class Places:
    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: list[tuple[int, int]] = []
        """(start, stop), in order."""

    def take(self, size: int) -> int | None:
        """Return the start of the first gap of `size` bytes, None if there is none."""
        start = 0
        for first, stop in [*self._taken, (self._size, self._size)]:
            if start + size <= first:
                insort(self._taken, (start, start + size))
                return start
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return None

    def free(self, start: int) -> None:
        """Give a place back. Raises ValueError for a place that is not taken."""
        for at, (first, _) in enumerate(self._taken):
            if first == start:
                del self._taken[at]
                return
        raise ValueError(f"no place begins at {start}")
