"""Memory of a slice on which every instance has weights and KV of its own (SLINFER section 7). It
is sized in advance and resized at a cost.

7 A, equation 2: how much KV memory an instance needs. 7 B, 7 D: when that is worth a resize. 7 C:
books by which many resizes, loads and unloads are under way at once without running out. Slices
that hand slabs of one arena from model to model (`policy.slice.kv`) need none of this."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def required_bytes(
    requests: Iterable[tuple[int, int]], mean_output: float, least_tokens: int, token_bytes: float
) -> int:
    """Equation 2: M_require = C * max(sum over requests (I_r + max(O_r, mean O)), L_min).

    `requests`: (prompt tokens, tokens out so far); `token_bytes` is C, `least_tokens` L_min.
    """
    tokens = sum(prompt + max(out, mean_output) for prompt, out in requests)
    return round(token_bytes * max(tokens, least_tokens))


def raised(current: int, required: int, watermark: float, free: int) -> int | None:
    """KV memory after a request joins: early up, to M_recommend = M_require * (1 + w), or as far as
    `free` bytes allow (7 D's compromise). `current` if that is enough; None if not even M_require
    can be had."""
    if required <= current:
        return current
    most = current + free
    return None if required > most else min(round(required * (1.0 + watermark)), most)


def lowered(current: int, required: int, watermark: float) -> int:
    """KV memory after a request left: lazy down, only once M_recommend * (1 + w) < M_cur."""
    recommended = round(required * (1.0 + watermark))
    return recommended if recommended * (1.0 + watermark) < current else current


class MemoryBooks(Generic[T]):
    """One slice's memory (7 C). The budget is optimistic: what is in use once all that was asked
    for is done, so new wishes are judged by it. `tracked_bytes` is pessimistic: memory counts from
    when it is given out until it is known to be free again. What the first allows and the second
    does not yet waits in the reservation station, first come first served.

    An operation `T` is whatever the caller carries out later.
    """

    __slots__ = ("_station", "budget_bytes", "capacity_bytes", "tracked_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.budget_bytes = 0
        self.tracked_bytes = 0
        self._station: deque[tuple[int, T]] = deque()

    @property
    def free_bytes(self) -> int:
        """What can still be asked for."""
        return self.capacity_bytes - self.budget_bytes

    def up(self, size: int, operation: T) -> bool:
        """Ask for `size` more bytes, at most `free_bytes`. True: carry the operation out now.
        False: it comes out of `freed` later."""
        assert size <= self.free_bytes, "more than the budget was asked for"
        self.budget_bytes += size
        if self._station or self.tracked_bytes + size > self.capacity_bytes:
            self._station.append((size, operation))
            return False
        self.tracked_bytes += size
        return True

    def cancel(self, unwanted: Callable[[T], bool]) -> int:
        """Forget waiting operations; the bytes they asked for are in the budget no more."""
        size = sum(size for size, operation in self._station if unwanted(operation))
        self._station = deque(one for one in self._station if not unwanted(one[1]))
        self.budget_bytes -= size
        return size

    def down(self, size: int) -> None:
        """Begin to give bytes back, at once in the budget; `freed` when that is done."""
        self.budget_bytes -= size

    def freed(self, size: int) -> list[T]:
        """Bytes are free again: what can be carried out now."""
        self.tracked_bytes -= size
        ready: list[T] = []
        while self._station:
            size, operation = self._station[0]
            if self.tracked_bytes + size > self.capacity_bytes:
                break
            self._station.popleft()
            self.tracked_bytes += size
            ready.append(operation)
        return ready
