"""How long to wait after failures in a row."""

_DOUBLINGS_MAX = 32
"""Enough for any limit, and few enough for a float: failures may go on for weeks."""


def back_off_s(failures: int, first_s: float, most_s: float) -> float:
    """Return `first_s` after no failure before this one, then twice as long each time, up to
    `most_s`; all in seconds."""
    return min(most_s, first_s * 2.0 ** min(failures, _DOUBLINGS_MAX))
