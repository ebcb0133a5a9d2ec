"""What is learned from how requests went: a machine's throughput, and how long may be waited."""

from dataclasses import dataclass
from math import inf

_WEIGHT = 0.3
_WINDOW_S = 0.5
_LATE_TOLERATED = 0.02
"""The share of first tokens that may be late."""
_LATE_STEP = 0.1


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
    other work on its cores. A late first token lowers the share by a tenth. One in time raises
    it a little: the share stays level while `_LATE_TOLERATED` of them are late."""

    value: float = 0.5
    most: float = 0.75
    least: float = 0.05

    def note(self, *, late: bool) -> None:
        raised = _LATE_STEP * _LATE_TOLERATED / (1.0 - _LATE_TOLERATED)
        factor = 1.0 - _LATE_STEP if late else 1.0 + raised
        self.value = min(self.most, max(self.least, self.value * factor))


class Pace:
    """The share of the targets that predicted times may take on a CPU slice in an overload.
    Predictions leave out what comes between steps: other prompts, other work on the cores.

    It falls when an answer was too slow. Those that were sent before it fell tell nothing about its
    new value."""

    LEAST = 0.1
    MOST = 1.0
    LOWER = 0.75
    HIGHER = 1.005
    SLOW_S = 5.0

    def __init__(self) -> None:
        self.share = self.MOST
        self._lowered_s = self._slow_s = -inf

    def slow(self, now: float) -> bool:
        """Return whether an answer was too slow lately."""
        return now - self._slow_s < self.SLOW_S

    def note(self, *, late: bool, sent_s: float, now: float) -> None:
        """Learn from an answer's time per token. `sent_s`: when it was sent to its slice."""
        self._slow_s = now if late else self._slow_s
        if sent_s < self._lowered_s:
            return
        factor = self.LOWER if late else self.HIGHER
        self.share = min(self.MOST, max(self.LEAST, self.share * factor))
        if late:
            self._lowered_s = now
