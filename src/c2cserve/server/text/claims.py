"""Which request a text process may take next, so that costly ones delay no others for long.

Text processes are few, and one request may hold a process until its time limit. So neither one
model's requests nor all *costly* requests together take the last process. A request is costly if

- its body is large,
- its model was slow with a small body a short time ago (an endless chat template, say), or
- it has held its process for long already.

A model that turns out to be slow is unknown at first, and may take the last process once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LARGE_BYTES = 128 << 10
"""A body of this size or more is costly."""
LONG_S = 1.0
"""Seconds that a small body does not take."""
PATIENCE_S = 0.1
"""How long a request may take before those behind it go elsewhere."""
REMEMBERED_S = 60.0
"""How long a slow model counts as such."""


@dataclass(slots=True, eq=False)
class Claim:
    """One request for a text process. Its `since`, in seconds, is of its present work there."""

    model: str
    version: str
    large: bool
    since: float = 0.0
    displaced: bool = False
    """It was behind one that took long."""


class Sharing:
    """Decides who may have a process of `processes`. `now`, in seconds, never falls."""

    def __init__(self, processes: int) -> None:
        self._most = max(1, processes - 1)
        self._slow_until: dict[str, float] = {}

    def may_start(self, claim: Claim, running: Collection[Claim], now: float) -> bool:
        """Return whether the request may take an idle process beside those that run."""
        same = sum(one.model == claim.model for one in running)
        if same >= self._most:
            return False
        costly = sum(self._costly(one, now) or now - one.since > LONG_S for one in running)
        return costly < self._most or not self._costly(claim, now)

    def may_follow(
        self, claim: Claim, before: Sequence[Claim], others: Collection[Sequence[Claim]], now: float
    ) -> bool:
        """Return whether a request may be sent to a process that has some `before` it, one at
        least. `others`: those of other processes. Nothing costly waits or is waited for."""
        if claim.displaced or now - before[0].since > PATIENCE_S:
            return False
        if any(self._costly(one, now) for one in (claim, *before)):
            return False
        same = sum(any(one.model == claim.model for one in claims) for claims in others)
        return same < self._most

    def ended(self, claim: Claim, now: float) -> None:
        """Note whether the work of a request that leaves its process says that its model is
        slow."""
        if not claim.large and now - claim.since > LONG_S:
            self._slow_until[claim.model] = now + REMEMBERED_S

    def _costly(self, claim: Claim, now: float) -> bool:
        until = self._slow_until.get(claim.model)
        if until is not None and until <= now:
            del self._slow_until[claim.model]
            until = None
        return claim.large or until is not None
