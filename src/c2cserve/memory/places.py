"""Places in one stretch of memory: first fit, at multiples of 256 bytes. No memory is touched."""

from bisect import insort

_ALIGNMENT = 256


class Places:
    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: list[tuple[int, int]] = []
        """(start, stop), in order."""

    def take(self, size: int) -> int | None:
        """The start of the first gap of `size` bytes."""
        start = 0
        for first, stop in [*self._taken, (self._size, self._size)]:
            if start + size <= first:
                insort(self._taken, (start, start + size))
                return start
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return None

    def free(self, start: int) -> None:
        """Raises ValueError for a place nobody has taken."""
        for at, (first, _) in enumerate(self._taken):
            if first == start:
                del self._taken[at]
                return
        raise ValueError(f"no place begins at {start}")
