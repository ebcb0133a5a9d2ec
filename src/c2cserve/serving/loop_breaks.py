"""How often a loop has broken lately: one that breaks again and again ends its server."""

import time
from collections import deque

_BREAKS_MAX = 5
_WINDOW_S = 60.0


class LoopBreaks:
    def __init__(self) -> None:
        self._times_s: deque[float] = deque()
        """Recent times when the loop broke and no request was at fault."""

    def note(self) -> None:
        self._times_s.append(time.monotonic())

    def excuse(self, count: int) -> None:
        """Forget the last ones, since their cause is gone."""
        for _ in range(min(count, len(self._times_s))):
            self._times_s.pop()

    @property
    def too_many(self) -> bool:
        now = time.monotonic()
        while self._times_s and now - self._times_s[0] > _WINDOW_S:
            self._times_s.popleft()
        return len(self._times_s) >= _BREAKS_MAX


def reason(whose: str, fault: Exception) -> str:
    """Return in one line why a server ends whose loop broke too often, at last by `fault`."""
    return (
        f"the {whose}'s loop broke {_BREAKS_MAX} times within {_WINDOW_S:g} s, "
        f"at last: {type(fault).__name__}: {fault}"
    )
