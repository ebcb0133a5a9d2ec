"""Which request a text process may take next, so that costly ones delay no others for long.

Text processes are few, and one request may hold a process until its time limit. So neither one
model's requests nor all *costly* requests together take the last process. A request is costly if

- its body is large,
- its model was slow with a small body a short time ago (an endless chat template, say), or
- it has held its process for long already.

A model that turns out to be slow is unknown at first, and may take the last process once.
"""

from collections import Counter
from collections.abc import Collection, Set
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
    size: int
    """Bytes of its body."""
    since: float = 0.0
    slow: bool = False
    """It has taken longer than those behind it wait (`PATIENCE_S`). That is noted once all answers
    that had arrived were read: a late event loop must not take its own delay for the process's."""
    displaced: bool = False
    """It was behind one that took long."""

    @property
    def large(self) -> bool:
        return self.size >= LARGE_BYTES

    @property
    def alone(self) -> bool:
        """It is never sent to a process behind others."""
        return self.large or self.displaced


class Assigned:
    """The requests that a process has."""

    COUNT = 64
    BYTES = 64 << 10
    """It takes some 20 ms for so much text. A late event loop is that late, and a process that has
    less would wait for it."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        """The one that it works for first."""
        self._models = Counter[str]()
        self._bytes = 0

    @property
    def full(self) -> bool:
        return len(self.claims) >= self.COUNT or self._bytes >= self.BYTES

    @property
    def models(self) -> Set[str]:
        return self._models.keys()

    def add(self, claim: Claim) -> None:
        self.claims.append(claim)
        self._models[claim.model] += 1
        self._bytes += claim.size

    def remove(self, claim: Claim) -> None:
        self.claims.remove(claim)
        self._bytes -= claim.size
        self._models[claim.model] -= 1
        if not self._models[claim.model]:
            del self._models[claim.model]


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
        self, claim: Claim, before: Assigned, others: Collection[Assigned], now: float
    ) -> bool:
        """Return whether a request may be sent to a process that has some `before` it, one at
        least. `others`: those of other processes. Nothing costly waits or is waited for."""
        first = before.claims[0]
        if claim.alone or first.large or first.slow:
            return False
        if any(self._is_slow(model, now) for model in (claim.model, *before.models)):
            return False
        return sum(claim.model in one.models for one in others) < self._most

    def ended(self, claim: Claim, now: float) -> None:
        """Note whether the work of a request that leaves its process says that its model is
        slow."""
        if not claim.large and now - claim.since > LONG_S:
            self._slow_until[claim.model] = now + REMEMBERED_S

    def _costly(self, claim: Claim, now: float) -> bool:
        return claim.large or self._is_slow(claim.model, now)

    def _is_slow(self, model: str, now: float) -> bool:
        until = self._slow_until.get(model)
        if until is not None and until <= now:
            del self._slow_until[model]
            until = None
        return until is not None
