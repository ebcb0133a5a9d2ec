"""Fair shares of work among tenants: virtual token counters (ours, after "Fairness in Serving Large
Language Models", OSDI 24).

Each tenant has a counter of the work that was done for it:

    work = prompt tokens + 2 * output tokens

At dispatch, a request is charged with its prompt and its expected output. At its end it is charged
with what it really sampled. Of the tenants whose requests wait, the one with the lowest counter is
served next. While two tenants wait all the time, the work done for them differs by a bounded number
of requests. It does not matter how many either of them sends.

A tenant that had no request for a while has no claim on what it did not use. When it comes back,
its counter is raised to the lowest one of the tenants with requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from c2cserve.core.request import Request

OUTPUT_WORK = 2.0
"""The work of an output token, in prompt tokens: it takes a step of its own."""


@dataclass(slots=True, eq=False)
class _Account:
    """The account of a request that waits or is on a slice."""

    request: Request
    expected: float = 0.0
    """Output tokens that it is charged with since it was dispatched last,"""
    sent: int | None = None
    """and those that were sent before; None: it was not dispatched."""


@dataclass(slots=True, eq=False)
class _Group:
    """The choices of one request that wait or are on slices."""

    members: dict[str, Request] = field(default_factory=dict[str, Request])
    begun: bool = False
    """One of them was dispatched."""


def within_share(own: int, total: int, tenants: int, places: int) -> bool:
    """Whether a tenant has less than its share of the requests that are under way, and of the
    places. `own`: its requests, of a `total` of that many tenants; `places`: 0 if not known."""
    return tenants > 1 and own * tenants < total and (not places or own * tenants <= places)


class FairShares:
    """The counters of all tenants. They only decide where more than one tenant has requests."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._groups: dict[str, _Group] = {}
        self._present: dict[str, int] = {}
        """Requests of each tenant; no entry for a tenant without any."""
        self._served: dict[str, float] = {}
        self._floor = 0.0
        """What a tenant that comes now starts from."""

    @property
    def tenants(self) -> int:
        """The number of tenants with requests."""
        return len(self._present)

    def served(self, tenant: str) -> float:
        """Return the work done for the tenant."""
        return self._served.get(tenant, self._floor)

    def present(self, tenant: str) -> int:
        """Return how many requests the tenant has that wait or are on slices."""
        return self._present.get(tenant, 0)

    def within(self, tenant: str, places: int) -> bool:
        """Whether the tenant has less than its share: none of its requests is refused because of
        others."""
        return within_share(self._present.get(tenant, 0), len(self._accounts), self.tenants, places)

    def together(self, request: Request) -> Sequence[Request]:
        """Return all choices of its request that wait or are on slices, itself among them."""
        group = self._groups.get(request.group)
        return (request,) if group is None else tuple(group.members.values())

    def begun(self, request: Request) -> bool:
        """Whether one of several choices of its request was dispatched."""
        group = self._groups.get(request.group)
        return group is not None and group.begun

    def entered(self, request: Request, *, begun: bool = False) -> None:
        """Note that the request waits. One that waits again is known already. `begun`: it was on a
        slice before."""
        if request.group:
            group = self._groups.setdefault(request.group, _Group())
            group.members[request.id] = request
            group.begun |= begun
        if request.id in self._accounts:
            return
        tenant = request.tenant
        self._accounts[request.id] = _Account(request)
        if tenant not in self._present:
            self._raise_floor()
            self._served[tenant] = max(self.served(tenant), self._floor)
        self._present[tenant] = self._present.get(tenant, 0) + 1

    def dispatched(self, request: Request, mean_output: float) -> None:
        """Charge the request with its prompt and the output that is expected of it. Choices are
        charged one by one: a tenant that comes now starts from what was begun for the others."""
        if request.group:
            self._groups[request.group].begun = True
        account = self._accounts[request.id]
        account.expected = min(mean_output, float(request.max_new_tokens))
        account.sent = request.sent
        self._charge(request.tenant, request.prompt_len + OUTPUT_WORK * account.expected)

    def ended(self, request_id: str, output_len: int | None = None) -> None:
        """The request is gone. `output_len`: all that was sent of it, where that is known; else
        what was expected stays charged."""
        account = self._accounts.pop(request_id, None)
        if account is None:
            return
        tenant, group = account.request.tenant, account.request.group
        if account.sent is not None and output_len is not None:
            self._charge(tenant, OUTPUT_WORK * (output_len - account.sent - account.expected))
        if group:
            del self._groups[group].members[request_id]
            if not self._groups[group].members:
                del self._groups[group]
        self._raise_floor()
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            absent = [one for one in self._served if one not in self._present]
            for one in absent:
                if self._served[one] <= self._floor:
                    del self._served[one]

    def _charge(self, tenant: str, work: float) -> None:
        self._served[tenant] = self.served(tenant) + work

    def _raise_floor(self) -> None:
        """Raise the floor to the lowest counter of a tenant with requests; it never goes back."""
        if not self._present:
            return
        lowest = inf
        for one in self._present:
            lowest = min(lowest, self.served(one))
        self._floor = max(self._floor, lowest)
