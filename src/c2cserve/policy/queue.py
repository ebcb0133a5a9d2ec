"""Requests that wait at the controller, by urgency, and whose turn it is to be refused."""

from bisect import bisect_left, insort
from collections.abc import Iterator, KeysView

from c2cserve.core.request import Request

_PRIORITY_S = 1.0
"""A step of priority is worth so many seconds of waiting: high priority goes first, and nothing
waits forever behind it."""

Urgency = tuple[bool, float, str]
"""Smallest first: displaced ones in front (their clients may have seen tokens already), then by
when the first token is due. It never changes while a request waits: all age alike."""


class WaitingQueue:
    def __init__(self) -> None:
        self._by_model: dict[str, list[tuple[Urgency, Request]]] = {}
        self._urgency: dict[str, Urgency] = {}
        self._model: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._urgency)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._urgency

    def __iter__(self) -> Iterator[Request]:
        """Most urgent first."""
        entries = sorted(entry for line in self._by_model.values() for entry in line)
        return (request for _, request in entries)

    def models(self) -> KeysView[str]:
        """Those with waiting requests, as of any moment."""
        return self._by_model.keys()

    def count(self, model: str) -> int:
        return len(self._by_model.get(model, ()))

    def head(self, model: str) -> tuple[Urgency, Request] | None:
        line = self._by_model.get(model)
        return line[0] if line else None

    def of(self, model: str) -> list[Request]:
        return [request for _, request in self._by_model.get(model, ())]

    def displaced(self, request_id: str) -> bool:
        return not self._urgency[request_id][0]

    def push(self, request: Request, *, displaced: bool = False) -> None:
        due_s = request.first_token_due_s - _PRIORITY_S * request.priority
        urgency = (not displaced, due_s, request.id)
        self._urgency[request.id] = urgency
        self._model[request.id] = request.model
        insort(self._by_model.setdefault(request.model, []), (urgency, request))

    def remove(self, request_id: str) -> Request | None:
        urgency = self._urgency.pop(request_id, None)
        if urgency is None:
            return None
        model = self._model.pop(request_id)
        line = self._by_model[model]
        # A longer tuple sorts behind its own beginning, so this finds the entry itself.
        _, request = line.pop(bisect_left(line, (urgency,)))
        if not line:
            del self._by_model[model]
        return request

    def excess(self, newcomer: Request) -> Request:
        """Whom to refuse when `newcomer` is one too many: the least urgent of the model that has
        most waiting, so that one busy model can not fill the queue for all."""
        own = len(self._by_model[newcomer.model])
        longest = max(self._by_model, key=lambda name: (len(self._by_model[name]), name))
        line = self._by_model[longest if len(self._by_model[longest]) > own else newcomer.model]
        last = line[-1][1]
        return newcomer if self.displaced(last.id) else last
