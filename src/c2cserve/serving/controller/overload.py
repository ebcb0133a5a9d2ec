"""Refusing in an overload before anything is done for a request.

The controller's policy refuses what would be late, by its queue. But what comes before it takes
processor time that answers need: to read a body, to tokenize it, to send it there. And requests may
wait there as well, where neither the policy nor a limit on its queue sees them.
"""

from collections import Counter
from collections.abc import Mapping

from c2cserve.core.actions import Backlog
from c2cserve.policy.cluster.admission import IN_TIME_SHARE, Standing, Throughput, turns_before
from c2cserve.runtime.gateway import Refused


class FrontDoor:
    """Lets requests in, or refuses those whose first token would be late. Used on the server's
    event loop."""

    def __init__(self, burst_s: float) -> None:
        """`burst_s`: as `policy.cluster.admission.AdmissionSettings` has it."""
        self._preparing = Throughput()
        """Requests that are prepared per second while others wait for that."""
        self._standing = Standing(burst_s)
        self.refused = 0

    def prepared(self) -> None:
        """A request is on its way to the controller."""
        self._preparing.finished()

    def refusal(
        self, backlog: Backlog, tenant: str, ttft_s: float, preparing: Mapping[str, int], now: float
    ) -> Refused | None:
        """Why a request that comes now is refused. None: it can be in time, or this is no overload.

        `backlog`: what the policy told last. `preparing`: each tenant's requests that came in and
        did not reach the controller yet."""
        crowd = sum(preparing.values())
        self._preparing.refresh(now, saturated=crowd > 0)
        standing = self._standing.note(waiting=crowd > 0, now=now)
        expected_s = 0.0
        if standing:
            expected_s = self._preparing.wait_s(turns_before(tenant, preparing))
        if backlog.per_s:
            waiting = Counter(dict(backlog.waiting))
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
        """Why a request that has been prepared is refused all the same: in an overload, it is late
        already."""
        if waited_s <= ttft_s or not (self._standing.is_long or backlog.per_s):
            return None
        self.refused += 1
        reason = f"the first token was due within {ttft_s:g} s; {waited_s:.1f} s have passed"
        return Refused(429, reason, max(1.0, waited_s))
