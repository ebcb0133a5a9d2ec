"""Refusing requests in an overload before any work is done for them.

The controller's policy knows its queue, and refuses requests that would be late. But reading,
tokenizing and sending a body comes before that, and takes processor time that answers need.
Requests may also wait before they reach the policy, where it cannot see them.
"""

from collections import Counter
from collections.abc import Mapping

from c2cserve.core.actions import Backlog
from c2cserve.policy.cluster.admission import IN_TIME_SHARE, Standing, Throughput, turns_before
from c2cserve.runtime.gateway import Refused

_LONG = 16
"""Requests that wait for places. From so many on, all models' are taken to wait."""


class OverloadCheck:
    """Decides which requests are refused because their first token would be late. Used on the
    server's event loop."""

    def __init__(self, burst_s: float) -> None:
        """`burst_s`: as `policy.cluster.admission.AdmissionSettings` has it."""
        self._preparing = Throughput()
        """Requests prepared per second, measured while others wait for it."""
        self._standing = Standing(burst_s)
        self.refused = 0

    def prepared(self) -> None:
        """Note that a request was prepared and goes to the controller."""
        self._preparing.finished()

    def refusal(
        self, backlog: Backlog, model: str, tenant: str, ttft_s: float,
        preparing: Mapping[str, int], now: float,
    ) -> Refused | None:  # fmt: skip
        """Return why a request that arrives now is refused; None if it can be in time, or if there
        is no overload.

        `backlog`: the policy's latest one. A short one concerns only models that requests wait for:
        they may wait for their weights, while others have room. `preparing`: tenant -> its requests
        that have arrived and have not reached the controller yet."""
        crowd = sum(preparing.values())
        self._preparing.refresh(now, saturated=crowd > 0)
        standing = self._standing.note(waiting=crowd > 0, now=now)
        expected_s = 0.0
        if standing:
            expected_s = self._preparing.wait_s(turns_before(tenant, preparing))
        waiting = Counter(dict(backlog.waiting))
        if backlog.per_s and (model in backlog.models or waiting.total() >= _LONG):
            waiting.update(preparing)
            expected_s = max(expected_s, turns_before(tenant, waiting) / backlog.per_s)
        if expected_s <= IN_TIME_SHARE * ttft_s:
            return None
        self.refused += 1
        reason = (
            f"the first token is due within {ttft_s:g} s; with what waits already it would take "
            f"{expected_s:.1f} s"
        )
        return Refused(429, reason, max(1.0, expected_s))

    def too_late(self, backlog: Backlog, waited_s: float, ttft_s: float) -> Refused | None:
        """Return why a prepared request is refused after all: there is an overload, and it is late
        already. None if it may go on."""
        if waited_s <= ttft_s or not (self._standing.is_long or backlog.per_s):
            return None
        self.refused += 1
        reason = f"the first token was due within {ttft_s:g} s; {waited_s:.1f} s have passed"
        return Refused(429, reason, max(1.0, waited_s))
