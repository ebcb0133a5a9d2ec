"""Requests that wait at the controller: whose turn it is, and which one is too many.

Requests of each model wait in lines, one for each tenant. First in a line are requests that a fault
has displaced: their clients may have seen tokens already. Then come choices of requests of which
another choice has begun. Then come those that can still be in time, then the late ones. Each class
is ordered by when the first token is due. So a late request never delays one that can be in time.
Between lines the tenant decides that was served least
(`policy.cluster.fairness`)."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from c2cserve.core.request import Request
from c2cserve.policy.cluster.fairness import FairShares
from c2cserve.policy.headroom import due_s

DISPLACED = 0
BEGUN = 1
FRESH = 2
LATE = 3

Urgency = tuple[int, float, str]
"""Smallest first: class, when the first token is due (with priority), id."""

QueueRank = tuple[bool, float, int, Urgency]
"""Smallest first: not displaced, work done for the tenant, its requests under way, urgency."""

Entry = tuple[Urgency, Request]
_GONE_MAX = 1024
"""Requests that left before they were due, of which the queue may still have the time."""


@dataclass(slots=True, eq=False)
class _Lines:
    """The lines of one model, sorted: one for each tenant that has requests waiting."""

    of_tenant: dict[str, list[Entry]] = field(default_factory=dict[str, list[Entry]])
    count: int = 0
    shut_out_bytes: int = 0
    """The bytes of the model's weights if it runs nowhere and found no memory, else 0."""


class WaitingQueue:
    def __init__(self, shares: FairShares | None = None) -> None:
        self._shares = shares or FairShares()
        self._by_model: dict[str, _Lines] = {}
        self._entries: dict[str, Entry] = {}
        self._aging: list[tuple[float, str]] = []
        """When the first tokens of fresh requests are due; a heap."""
        self.uncovered: set[str] = set()
        """Models whose first request has left or became late, so that another one is first. Whether
        that can be placed was not tried yet. The policy clears it when it has."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Request]:
        """Most urgent first, whatever their tenants."""
        return (request for _, request in sorted(self._entries.values(), key=_urgency))

    def models(self) -> KeysView[str]:
        """Those with waiting requests, as of any moment."""
        return self._by_model.keys()

    def count(self, model: str) -> int:
        lines = self._by_model.get(model)
        return 0 if lines is None else lines.count

    def due_s(self, model: str) -> float:
        """Return when the first token of a model's oldest request was or is due."""
        lines = self._by_model[model].of_tenant.values()
        return min(urgency[1] for line in lines for urgency, _ in line)

    def head(self, model: str) -> Entry | None:
        """Return the request of the model that is placed next."""
        turn = self.turn(model)
        return None if turn is None else self._entries[turn[3][2]]

    def request(self, turn: QueueRank) -> Request:
        """Return the request whose rank this is."""
        return self._entries[turn[3][2]][1]

    def turn(self, model: str) -> QueueRank | None:
        """Return the rank of the model's head, None if the model has no waiting requests."""
        lines = self._by_model.get(model)
        if lines is None:
            return None
        first: QueueRank | None = None
        for tenant, line in lines.of_tenant.items():
            rank = self._rank(tenant, line[0][0])
            if first is None or rank < first:
                first = rank
        return first

    def heads(self, model: str) -> list[Request]:
        """Return the first request of each tenant that waits for the model, as turns go."""
        lines = self._by_model.get(model)
        if lines is None:
            return []
        ranks = [self._rank(tenant, line[0][0]) for tenant, line in lines.of_tenant.items()]
        return [self._entries[rank[3][2]][1] for rank in sorted(ranks)]

    def _rank(self, tenant: str, urgency: Urgency) -> QueueRank:
        shares = self._shares
        return urgency[0] != DISPLACED, shares.served(tenant), shares.present(tenant), urgency

    def shut_out(self, model: str, weight_bytes: int) -> None:
        """Note whether a model with waiting requests found memory. `weight_bytes`: of its weights
        if it runs nowhere and found none, else 0."""
        self._by_model[model].shut_out_bytes = weight_bytes

    def owed_bytes(self, model: str) -> int:
        """Return the largest weights of the other models that are shut out."""
        most = 0
        for name, lines in self._by_model.items():
            if name != model and lines.shut_out_bytes > most:
                most = lines.shut_out_bytes
        return most

    def of(self, model: str) -> list[Request]:
        """Most urgent first, whatever their tenants."""
        lines = self._by_model.get(model)
        if lines is None:
            return []
        entries = [entry for line in lines.of_tenant.values() for entry in line]
        return [request for _, request in sorted(entries, key=_urgency)]

    def displaced(self, request_id: str) -> bool:
        return self._entries[request_id][0][0] == DISPLACED

    def begun(self, request_id: str) -> bool:
        """Whether its client may have output: it was displaced, or another choice has begun."""
        return self._entries[request_id][0][0] <= BEGUN

    def fresh(self, request_id: str) -> bool:
        """Whether nothing of it has begun, and it can still be in time."""
        return self._entries[request_id][0][0] == FRESH

    def late(self, request_id: str) -> bool:
        return self._entries[request_id][0][0] == LATE

    def punctual(self, usable: Callable[[str], bool], *, displaced: bool = True) -> dict[str, int]:
        """Return how many requests of usable models are not late, by tenant. `displaced`: whether
        those that are displaced or have begun count."""
        counts: dict[str, int] = {}
        for model, lines in self._by_model.items():
            if usable(model):
                for tenant, line in lines.of_tenant.items():
                    first = 0 if displaced else _before(line, FRESH)
                    if (last := _before(line, LATE)) > first:
                        counts[tenant] = counts.get(tenant, 0) + last - first
        return counts

    def models_in_time(self, usable: Callable[[str], bool]) -> list[str]:
        """Return the usable models, sorted, with requests that are not late."""
        return sorted(
            model for model, lines in self._by_model.items()
            if usable(model) and any(_before(line, LATE) for line in lines.of_tenant.values())
        )  # fmt: skip

    def push(self, request: Request, *, displaced: bool = False) -> None:
        kind = BEGUN if self._shares.begun(request) else FRESH
        kind = DISPLACED if displaced else kind
        self._insert(((kind, due_s(request, 0), request.id), request))
        if kind == FRESH:
            heappush(self._aging, (request.first_token_due_s, request.id))
            if len(self._aging) > 2 * len(self._entries) + _GONE_MAX:
                fresh = [one for urgency, one in self._entries.values() if urgency[0] == FRESH]
                self._aging = [(one.first_token_due_s, one.id) for one in fresh]
                heapify(self._aging)

    def follow(self, request: Request) -> None:
        """Let the other choices of a request follow its first one: they are not late any more."""
        for one in self._shares.together(request):
            entry = self._entries.get(one.id)
            if entry is not None and entry[0][0] > BEGUN:
                self._move(entry, BEGUN)

    def together(self, request: Request) -> list[Request]:
        """Return the choices of its request that wait."""
        return [one for one in self._shares.together(request) if one.id in self._entries]

    def age(self, now: float) -> list[Request]:
        """Move requests whose first token is overdue behind those that can still be in time. Return
        those moved."""
        moved: list[Request] = []
        while self._aging and self._aging[0][0] < now:
            _, request_id = heappop(self._aging)
            entry = self._entries.get(request_id)
            if entry is not None and entry[0][0] == FRESH:
                self._move(entry, LATE)
                moved.append(entry[1])
        return moved

    def _move(self, entry: Entry, kind: int) -> None:
        """Give a waiting request the place of another class in its line."""
        urgency, request = entry
        line = self._by_model[request.model].of_tenant[request.tenant]
        self._take(line, urgency, request.model)
        moved = self._entries[request.id] = (kind, *urgency[1:]), request
        insort(line, moved, key=_urgency)

    def _insert(self, entry: Entry) -> None:
        _, request = entry
        self._entries[request.id] = entry
        lines = self._by_model.get(request.model)
        if lines is None:
            lines = self._by_model[request.model] = _Lines()
        lines.count += 1
        line = lines.of_tenant.get(request.tenant)
        if line is None:
            lines.of_tenant[request.tenant] = [entry]
        else:
            insort(line, entry, key=_urgency)

    def remove(self, request_id: str) -> Request | None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        urgency, request = entry
        lines = self._by_model[request.model]
        line = lines.of_tenant[request.tenant]
        self._take(line, urgency, request.model)
        lines.count -= 1
        if not line:
            del lines.of_tenant[request.tenant]
        if not lines.count:
            del self._by_model[request.model]
        return request

    def _take(self, line: list[Entry], urgency: Urgency, model: str) -> None:
        at = 0 if line[0][0] == urgency else bisect_left(line, urgency, key=_urgency)
        del line[at]
        if at == 0 and line:
            self.uncovered.add(model)

    def excess(self, newcomer: Request) -> Request:
        """Return the request to refuse when `newcomer` is one too many. It is the least urgent one
        of the tenant that has most waiting, of its model that has most. So neither one busy tenant
        nor one busy model can fill the queue for all. Ties are the newcomer's."""
        tenants: dict[str, int] = {}
        for lines in self._by_model.values():
            for tenant, line in lines.of_tenant.items():
                tenants[tenant] = tenants.get(tenant, 0) + len(line)
        tenant = _most(tenants, newcomer.tenant)
        models = {
            model: len(lines.of_tenant[tenant])
            for model, lines in self._by_model.items()
            if tenant in lines.of_tenant
        }
        model = _most(models, newcomer.model)
        last = self._by_model[model].of_tenant[tenant][-1][1]
        return newcomer if self.begun(last.id) else last


def _before(line: list[Entry], kind: int) -> int:
    """Return how many entries of a line come before all of the class."""
    return bisect_left(line, (kind, -inf, ""), key=_urgency)


def _urgency(entry: Entry) -> Urgency:
    return entry[0]


def _most(counts: dict[str, int], own: str) -> str:
    """Return the name with the highest count. Of several, it is `own` if that is among them."""
    longest = max(counts, key=lambda name: (counts[name], name))
    return longest if counts[longest] > counts.get(own, 0) else own
