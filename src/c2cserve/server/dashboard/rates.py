"""Amounts per second over the last seconds, from amounts that took some time to come together."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 5.0


@dataclass(slots=True)
class Rate:
    """Spreads each amount evenly over the time that it took. So a long load that ends just now
    counts with its last seconds only."""

    _amounts: deque[tuple[float, float, float]] = field(
        default_factory=deque[tuple[float, float, float]]
    )
    """Begin and end, seconds; amount."""

    def add(self, now: float, amount: float, took_s: float = 0.0) -> None:
        if amount:
            self._amounts.append((now - took_s, now, amount))
            self._forget(now)

    def per_s(self, now: float) -> float:
        """Return the amount per second between `now - WINDOW_S` and `now`."""
        self._forget(now)
        since_s, total = now - WINDOW_S, 0.0
        for begin_s, end_s, amount in self._amounts:
            took_s = end_s - begin_s
            share = 1.0 if took_s <= 0.0 else (end_s - max(begin_s, since_s)) / took_s
            total += amount * share
        return total / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._amounts and self._amounts[0][1] <= now - WINDOW_S:
            self._amounts.popleft()
