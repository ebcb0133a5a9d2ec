"""Requests that wait at the controller, by urgency, and whose turn it is to be refused."""

from bisect import bisect_left, insort
from collections.abc import Iterator, KeysView

from c2cserve.core.request import Request
from c2cserve.policy.headroom import due_s

Urgency = tuple[bool, float, str]
"""Smallest first: displaced ones in front (their clients may have seen tokens already), then by
when the first token is due. It never changes while a request waits: all age alike."""


class WaitingQueue:
    def __init__(self) -> None:
        self._by_model: dict[str, list[tuple[Urgency, Request]]] = {}
        self._entries: dict[str, tuple[Urgency, Request]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Request]:
        """Most urgent first."""
        return (request for _, request in sorted(self._entries.values()))

    def models(self) -> KeysView[str]:
        """Those with waiting requests, as of any moment."""
        return self._by_model.keys()

    def count(self, model: str) -> int:
        return len(self._by_model.get(model, ()))

    def head(self, model: str) -> tuple[Urgency, Request] | None:
        line = self._by_model.get(model)
        return line[0] if line else None

    def turn(self, model: str, now: float) -> tuple[bool, Urgency] | None:
        """When the most urgent request of the model is placed, smallest first: whoever can still
        be in time goes before those who are late."""
        head = self.head(model)
        if head is None:
            return None
        urgency, request = head
        return urgency[0] and now > request.first_token_due_s, urgency

    def of(self, model: str) -> list[Request]:
        return [request for _, request in self._by_model.get(model, ())]

    def displaced(self, request_id: str) -> bool:
        return not self._entries[request_id][0][0]

    def push(self, request: Request, *, displaced: bool = False) -> None:
        entry = ((not displaced, due_s(request, 0), request.id), request)
        self._entries[request.id] = entry
        insort(self._by_model.setdefault(request.model, []), entry)

    def remove(self, request_id: str) -> Request | None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        request = entry[1]
        line = self._by_model[request.model]
        del line[bisect_left(line, entry)]
        if not line:
            del self._by_model[request.model]
        return request

    def excess(self, newcomer: Request) -> Request:
        """Whom to refuse when `newcomer` is one too many: the least urgent of the model that has
        most waiting, so that one busy model can not fill the queue for all."""
        own = len(self._by_model[newcomer.model])
        longest = max(self._by_model, key=lambda name: (len(self._by_model[name]), name))
        line = self._by_model[longest if len(self._by_model[longest]) > own else newcomer.model]
        last = line[-1][1]
        return newcomer if self.displaced(last.id) else last
