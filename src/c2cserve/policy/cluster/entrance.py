"""Refusing requests in an overload before any work is done for them (ours).

`Admission` knows its queue, and refuses requests that would be late. But reading, tokenizing and
sending a body comes before that, and takes processor time that answers need. Requests may also wait
before they reach `Admission`, where it cannot see them.
"""

from collections.abc import Mapping
from math import inf

from c2cserve.core.actions import Backlog
from c2cserve.core.value import value
from c2cserve.policy.cluster.admission import CALM_S, Standing, turns_before
from c2cserve.policy.cluster.fairness import within_share
from c2cserve.policy.cluster.feedback import Throughput

_LONG = 16
"""Requests that wait for places. From so many on, all models' are taken to wait."""
_UNREAD = 0.1
"""The share of its TTFT target from which on a request was read late."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly in any number."""


@value
class Newcomer:
    """A request of which nothing was done yet."""

    model: str
    """The version of its model."""
    tenant: str
    ttft_s: float
    waited_s: float = 0.0
    """How long it waited to be read."""


class RetryTimes:
    """When refused requests should be sent again: spread evenly, and later the longer more is
    refused than is finished. So clients that keep to it do not come back together, and in the end
    ask for two to three times what can be done. That is enough to keep all slices busy."""

    MOST_S = 30.0
    WINDOW_S = 1.0
    GROWTH = 1.5

    def __init__(self) -> None:
        self.mean_s = 1.0
        self._per_s = 0.0
        self._since_s = 0.0
        self._refused = 0
        self._count = 0

    def after_s(self, least_s: float, per_s: float, now: float) -> float:
        """Return the time for one more refusal, between the mean and twice the mean. `least_s`:
        when what waits will be gone; `per_s`: requests finished per second, 0 if that is not known
        now."""
        self._per_s = per_s or self._per_s
        if (elapsed := now - self._since_s) >= self.WINDOW_S:
            finished = max(1.0, self._per_s) * elapsed
            grown = 1.0
            if self._refused > 2.0 * finished:
                grown = self.GROWTH
            elif self._refused < finished:  # a quiet time counts as so many windows
                grown = self.GROWTH ** -(elapsed / self.WINDOW_S)
            self.mean_s = min(self.MOST_S / 2, max(1.0, self.mean_s * grown))
            self._refused, self._since_s = 0, now
        self._refused += 1
        self._count += 1
        return max(least_s, self.mean_s * (1.0 + self._count * _GOLDEN % 1.0))


class Entrance:
    """Decides which requests are refused because their first token would be late."""

    def __init__(self, burst_s: float) -> None:
        """`burst_s`: as `AdmissionSettings` has it."""
        self._preparing = Throughput()
        """Requests prepared per second, measured while others wait for it."""
        self._standing = Standing(burst_s)
        self._unread = Standing(burst_s)
        """Requests that were read late, one after another: the event loop has too much to do."""
        self._last = Backlog()
        """The policy's latest one of an overload."""
        self._refused_s = -inf
        self.retries = RetryTimes()
        self.refused = 0

    def prepared(self) -> None:
        """Note that a request was prepared and goes to the controller."""
        self._preparing.finished()

    def strict(self, backlog: Backlog, now: float) -> bool:
        """Return whether any newcomer may be refused now. What is refused here never reaches the
        policy, which may so take the overload for over."""
        held = backlog.per_s > 0.0 or now - self._refused_s < CALM_S
        return held or self._standing.is_long or self._unread.is_long

    def refusal(
        self, backlog: Backlog, newcomer: Newcomer, preparing: Mapping[str, int],
        posted: Mapping[str, int], present: Mapping[str, int], now: float,
    ) -> tuple[str, float] | None:  # fmt: skip
        """Return why a request is refused, and when to try again. None if it can be in time, or if
        there is no overload.

        `backlog`: the policy's latest one. A short one concerns only models that requests wait for:
        they may wait for their weights, while others have room. `preparing`, `posted`: tenant ->
        its requests that are being prepared, and that the controller has not read yet. `present`:
        its choices under way, with those that were posted. A tenant with less than its share of
        them is not refused."""
        tenant, crowd = newcomer.tenant, sum(preparing.values())
        self._preparing.refresh(now, saturated=crowd > 0)
        self._standing.note(waiting=crowd > 0, now=now)
        self._unread.note(waiting=newcomer.waited_s > _UNREAD * newcomer.ttft_s, now=now)
        if not self.strict(backlog, now):
            return None
        if backlog.per_s:
            self._last = backlog
        else:
            backlog = Backlog(self._last.per_s, share=self._last.share)
        expected_s = 0.0
        if self._standing.is_long:
            expected_s = self._preparing.wait_s(turns_before(tenant, preparing))
        waiting = dict(backlog.waiting)
        for more in (preparing, posted):
            for name, count in more.items():
                waiting[name] = waiting.get(name, 0) + count
        long = sum(waiting.values()) >= _LONG
        if backlog.per_s and (long or newcomer.model in backlog.models):
            expected_s = max(expected_s, turns_before(tenant, waiting) / backlog.per_s)
        expected_s += newcomer.waited_s
        if expected_s <= backlog.share * newcomer.ttft_s:
            return None
        if _within_share(tenant, preparing, present, self._last.places):
            return None
        self.refused += 1
        self._refused_s = now
        reason = (
            f"the first token is due within {newcomer.ttft_s:g} s; with what waits already it "
            f"would take {expected_s:.1f} s"
        )
        return reason, self.retry_s(backlog, expected_s, now)

    def overdue(
        self, backlog: Backlog, waited_s: float, ttft_s: float, now: float
    ) -> tuple[str, float] | None:
        """Return why a prepared request is refused after all, and when to try again: there is an
        overload, and it is late already. None if it may go on."""
        if waited_s <= ttft_s or not self.strict(backlog, now):
            return None
        self.refused += 1
        reason = f"the first token was due within {ttft_s:g} s; {waited_s:.1f} s have passed"
        return reason, self.retry_s(backlog, 0.0, now)

    def retry_s(self, backlog: Backlog, least_s: float, now: float) -> float:
        """Return when a request that is refused in an overload should be sent again."""
        return self.retries.after_s(least_s, backlog.per_s, now)


def _within_share(
    tenant: str, preparing: Mapping[str, int], present: Mapping[str, int], places: int
) -> bool:
    """Return whether a tenant has less than its share with one request more."""
    if len(preparing) <= (tenant in preparing) and len(present) <= (tenant in present):
        return False  # there is no other
    tenants = len(preparing.keys() | present.keys() | {tenant})
    own = preparing.get(tenant, 0) + present.get(tenant, 0) + 1
    total = sum(preparing.values()) + sum(present.values()) + 1
    return within_share(own, total, tenants, places)
