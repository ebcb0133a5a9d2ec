"""What is learned from how requests went: a machine's throughput, and how long may be waited."""

from dataclasses import dataclass
from math import inf

_WEIGHT = 0.3
_WINDOW_S = 0.5
_JUDGED = 16
"""First tokens that are judged together."""
_LATE_TOLERATED = 0.02
"""The part of first tokens that may be late."""
_RAISED = 1.06
"""The share is level so where some 4 % of first tokens are late by chance."""


@dataclass(slots=True)
class Throughput:
    """Requests finished per second lately while others waited: what the machine can do. (What it
    does while none wait says how much is asked of it, not how much it can take.)"""

    per_s: float = 0.0
    _finished: int = 0
    _since_s: float | None = None

    def finished(self) -> None:
        self._finished += 1

    def refresh(self, now: float, *, saturated: bool) -> None:
        """`saturated`: requests wait that could run if there was room."""
        if not saturated:
            self._since_s = None
            return
        if self._since_s is None:
            self._finished, self._since_s = 0, now
        elapsed = now - self._since_s
        if elapsed >= _WINDOW_S and self._finished:
            rate = self._finished / elapsed
            self.per_s = rate if self.per_s == 0.0 else self.per_s + _WEIGHT * (rate - self.per_s)
            self._finished, self._since_s = 0, now

    def wait_s(self, ahead: int) -> float:
        """Return the expected wait behind so many requests; 0 while nothing is known."""
        return ahead / self.per_s if self.per_s > 0.0 else 0.0


@dataclass(slots=True)
class InTimeShare:
    """The share of its TTFT target that a request may be expected to wait for.

    The rest is for its prompt and for what delays it unseen: the event loops of a busy machine,
    other work on its cores. First tokens are judged some at a time. If too many were late, the
    share falls by as large a part of it as were late, by half at most. Else it rises a little.
    Requests that arrived before its last change tell nothing about it. Else one queue that was too
    long would take the share to its least, and too many would be refused for long."""

    value: float = 0.5
    most: float = 0.75
    least: float = 0.05
    _since_s: float = -inf
    _judged: int = 0
    _late: int = 0

    def note(self, *, late: bool, arrived_s: float, now: float) -> None:
        """Note a first token. `now`: when it came."""
        if arrived_s < self._since_s:
            return
        self._judged, self._late = self._judged + 1, self._late + late
        if self._judged < _JUDGED:
            return
        part = self._late / self._judged
        factor = _RAISED if part <= _LATE_TOLERATED else 1.0 - min(0.5, part)
        self.value = min(self.most, max(self.least, self.value * factor))
        self._since_s, self._judged, self._late = now, 0, 0
