"""How often a line that many requests may cause is logged."""

from dataclasses import dataclass

_EVERY_S = 1.0


@dataclass(slots=True)
class LogLimit:
    """Lets one line per second through, and counts the others."""

    _last_s: float = float("-inf")
    _left_out: int = 0

    def more(self, now: float) -> str | None:
        """Return what to add to a line: how many were left out before it. None: leave it out."""
        if now - self._last_s < _EVERY_S:
            self._left_out += 1
            return None
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._last_s, self._left_out = now, 0
        return more
