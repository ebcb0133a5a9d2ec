"""A front's loop: requests to nodes, models to pools; and after a node's loss, elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from c2cserve.core import events as ev
from c2cserve.core import fleet
from c2cserve.core.actions import Reject
from c2cserve.core.model import ModelSpec, name_of
from c2cserve.core.request import Request
from c2cserve.policy.fleet.copies import Copies
from c2cserve.policy.fleet.load_time import LoadTime
from c2cserve.policy.fleet.nodes import CachedPrefixes, NodeBook
from c2cserve.policy.fleet.placement import Destination, FleetPlacement, FleetSettings
from c2cserve.policy.fleet.pools import Pools
from c2cserve.policy.fleet.speeds import Speeds
from c2cserve.policy.uses import note_use

_PLACED_MAX = 16
"""Requests that one decision places. For each, 64 nodes may be looked at; a lost node has many."""
_HOT_SHARE = 0.5
"""Share of `FleetSettings.copy_load` from which on a model's copies are looked at."""


@dataclass(slots=True)
class _Held:
    """A request that this front has."""

    request: Request
    node_id: str = ""
    """Where it is; empty while it waits."""
    waiting_s: float | None = None
    """Since when no node could take it."""
    refused: dict[str, fleet.Declined] = field(default_factory=dict[str, fleet.Declined])
    deaths: int = 0
    """Nodes lost with it since it last made progress."""

    @property
    def model(self) -> str:
        return name_of(self.request.model)


class FleetPolicy:
    """`core.policy.Policy[FleetEvent, FleetAction]`. Each front runs one, over what all nodes
    report; fronts do not talk to each other."""

    done = False

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self._settings = settings or FleetSettings()
        self._nodes: dict[str, NodeBook] = {}
        self._models: dict[str, ModelSpec] = {}
        self._requests: dict[str, _Held] = {}
        self._waiting: dict[str, None] = {}
        """Requests that are on no node, oldest first."""
        self._due: dict[str, None] = {}
        """Those of them for which a node is looked for now; others wait until one is open."""
        self._decided_s = 0.0
        self._prefixes = CachedPrefixes(self._settings.prefix_blocks)
        self._loads: dict[str, LoadTime] = {}
        """The keys are kinds of nodes."""
        self._speeds: dict[tuple[str, float], Speeds] = {}
        """The keys are kinds of nodes, and prices: slices of one kind may be larger or smaller."""
        self._pools = Pools(self._models)
        self._placement = FleetPlacement(self._settings, self._nodes, self._prefixes, self._pools)
        self._copies = Copies(self._placement, self._models)
        self._reports: dict[str, fleet.NodeReport] = {}
        """Reports since the last decision."""
        self._begun: list[tuple[str, str]] = []
        """First tokens since then: request, node."""
        self._opened = True
        """Whether a node may take now what none could before."""

    @property
    def wakeup(self) -> float | None:
        if self._due:
            return self._decided_s
        copies_s = self._copies.wakeup
        waits = (self._requests[one].waiting_s for one in self._waiting)
        oldest = min((since for since in waits if since is not None), default=None)
        late_s = None if oldest is None else oldest + self._settings.no_node_s
        return min((one for one in (copies_s, late_s) if one is not None), default=None)

    # ---- events ---------------------------------------------------------------------------------

    def apply(self, event: fleet.FleetEvent) -> None:
        match event:
            case ev.Arrived(request):
                self._requests[request.id] = _Held(request)
                self._waiting[request.id] = self._due[request.id] = None
            case ev.FirstToken(request_id):
                if (held := self._requests.get(request_id)) is not None:
                    self._begun.append((request_id, held.node_id))
            case ev.Progressed(request_id):
                if (held := self._requests.get(request_id)) is not None:
                    held.deaths = 0
            case ev.Cancelled(request_id) | ev.Finished(request_id):
                self._forget(request_id)
            case ev.ModelAdded(spec):
                self._models[spec.id] = spec
                if spec.pinned:
                    for book in self._nodes.values():
                        book.pinned.pop(spec.id, None)
                    self._copies.review([spec.id])
            case ev.ModelRemoving(model):
                self._models.pop(model, None)
                self._copies.forget(model)
                self._pools.forget(model)
                for speeds in self._speeds.values():
                    speeds.forget(model)
            case fleet.NodeUp(node):
                loads = self._loads.setdefault(node.kind, LoadTime())
                speeds = self._speeds.setdefault((node.kind, node.price), Speeds())
                self._placement.add(NodeBook(node, loads, speeds))
                self._opened = True
                self._copies.review(one.id for one in self._models.values() if one.pinned)
                for book in self._nodes.values():
                    if book.draining:
                        self._leave(book)
            case fleet.NodeReport(node_id):
                if node_id in self._nodes:
                    self._reports[node_id] = event
            case fleet.NodeLost(node_id, displaced):
                self._lost(node_id, displaced)
            case fleet.Resumed(request, node_id, begun, deaths):
                held = self._requests[request.id] = _Held(request, node_id, deaths=deaths)
                if node_id:
                    self._take_over(held, self._nodes[node_id], begun=begun)
                else:
                    self._waiting[request.id] = self._due[request.id] = None
            case fleet.Declined(request, node_id):
                if (held := self._requests.get(request.id)) is not None:
                    held.refused[node_id] = event
                    self._take_off(held, request)

    def _take_over(self, held: _Held, book: NodeBook, *, begun: bool) -> None:
        """Count a request that another policy has sent to its node, as if it had come then."""
        request, at_s = held.request, held.request.arrival_s
        book.take_over(request, held.model, begun=begun)
        if (spec := self._models.get(held.model)) is None:
            return  # the model is being removed
        note_use(book.uses, spec, at_s)
        self._pools.asked(spec, request.prompt_len, at_s)
        self._prefixes.note(request, spec.id, held.node_id)
        self._copies.asked_s[spec.id] = at_s
        if book.draining:
            self._leave(book)

    def _lost(self, node_id: str, displaced: Sequence[Request]) -> None:
        book = self._placement.remove(node_id)
        self._reports.pop(node_id, None)
        for request in displaced:
            if (held := self._requests.get(request.id)) is not None:
                held.deaths += 1
                self._take_off(held, request)
        if book is not None:
            self._leave(book)

    def _leave(self, book: NodeBook) -> None:
        """Bring the models of a node that goes away to others. One that drains still has them."""
        self._copies.review((*sorted(book.uses), *book.pinned))

    def _take_off(self, held: _Held, request: Request) -> None:
        """Take the request off its node; it continues as `request`."""
        if (book := self._nodes.get(held.node_id)) is not None:
            book.left(request.id)
        held.request, held.node_id = request, ""
        self._waiting[request.id] = self._due[request.id] = None

    def _forget(self, request_id: str) -> None:
        held = self._requests.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._due.pop(request_id, None)
        if held is not None and (book := self._nodes.get(held.node_id)) is not None:
            book.left(request_id)

    # ---- decisions ------------------------------------------------------------------------------

    def decide(self, now: float) -> Sequence[fleet.FleetAction]:
        actions: list[fleet.FleetAction] = []
        for node_id, report in self._reports.items():
            book = self._nodes[node_id]
            before = book.draining
            self._pools.report(book, report, now)
            self._opened |= before and not report.draining
            if report.draining and not before:
                self._leave(book)
        self._reports.clear()
        for request_id, node_id in self._begun:
            if (book := self._nodes.get(node_id)) is not None:
                book.begun(request_id, now)
        self._begun.clear()
        if self._opened:
            self._due, self._opened = dict(self._waiting), False
        for request_id in [one for one in self._waiting if one not in self._due]:
            held = self._requests[request_id]
            if held.waiting_s is not None and now >= held.waiting_s + self._settings.no_node_s:
                actions.append(self._reject(held, 503, "no node of the cluster is up", 5.0))
        for request_id in list(islice(self._due, _PLACED_MAX)):
            del self._due[request_id]
            actions += self._place(self._requests[request_id], now)
        actions += self._copies.holds(now)
        self._decided_s = now
        return actions

    def _place(self, held: _Held, now: float) -> Sequence[fleet.FleetAction]:
        """Send the request to a node. If none is open it waits, unless nodes have refused it."""
        spec, settings = self._models.get(held.model), self._settings
        if spec is None:
            return [self._reject(held, 404, f"the model {held.model!r} does not exist", 1.0)]
        if held.deaths >= settings.deaths:
            why = f"{held.deaths} nodes were lost while they answered this request"
            return [self._reject(held, 500, why, 1.0)]
        found = None
        if len(held.refused) < settings.tries:
            found = self._placement.node_for(held.request, spec, held.refused, now)
        if found is None or self._excess(held, found, now):
            if held.refused:
                one = _kindest(held.refused.values())
                return [self._reject(held, one.status, one.reason, one.retry_after_s)]
            held.waiting_s = now if held.waiting_s is None else held.waiting_s
            return []
        book = self._nodes[found.node_id]
        source = self._placement.source(spec.id, book)
        used_s = () if book.has(spec.id) else self._pools.used_s(spec.id)
        if used_s:
            book.recall(spec, used_s)
        book.send(held.request, spec, found.cached, now)
        self._pools.hold(book, spec, now)
        self._pools.asked(spec, held.request.prompt_len, now)
        held.node_id, held.waiting_s = found.node_id, None
        del self._waiting[held.request.id]
        self._prefixes.note(held.request, spec.id, found.node_id)
        self._copies.asked_s[spec.id] = now
        hot = book.load > _HOT_SHARE * settings.copy_load
        if hot or self._placement.astray(book, held.request, spec, now):
            self._copies.review([spec.id])
        used_ago_s = tuple(round(now - one, 3) for one in used_s)
        return [fleet.SendTo(held.request.id, found.node_id, source, used_ago_s)]

    def _excess(self, held: _Held, to: Destination, now: float) -> bool:
        """Whether a node has refused the request in an overload, and this one would be late too. It
        would refuse as well, or its other models would make room for nothing. A request that has
        begun is offered on."""
        crowded = any(one.status == 429 for one in held.refused.values())
        if not crowded or held.request.sent or not to.late:
            return False
        self._copies.crowded_s[held.model] = now
        self._copies.review([held.model])
        return True

    def _reject(self, held: _Held, status: int, reason: str, retry_after_s: float) -> Reject:
        self._forget(held.request.id)
        return Reject(held.request.id, status, reason, retry_after_s)


def _kindest(refusals: Iterable[fleet.Declined]) -> fleet.Declined:
    """Return the refusal to show: one that says when to come back, the soonest first."""
    return min(refusals, key=lambda one: (one.status != 429, one.retry_after_s))
