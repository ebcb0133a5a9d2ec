"""Which node a request goes to, and which node a model goes to."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from math import gcd
from zlib import crc32

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Request, Slo
from c2cserve.core.value import value
from c2cserve.policy.fleet.nodes import CachedPrefixes, NodeBook, rank
from c2cserve.policy.fleet.pools import Pools

_EQUAL_S = 0.01
"""Costs that differ by less are equal."""
_SEARCHED_MAX = 64
"""Nodes that are looked at for a new model. The best of 64 is among the best few of any fleet."""
_COMPARED_MAX = 16
"""Nodes whose pools are looked at for a new model: those that are cheapest beside that."""

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly in any number."""


def _id_of(book: NodeBook) -> str:
    return book.node.id


@value
class FleetSettings:
    """What a fleet's policy is set to."""

    no_node_s: float = 30.0
    """Requests wait so long for a node when there is none."""
    tries: int = 3
    """Nodes that a request is offered to when they refuse it."""
    deaths: int = 3
    """Nodes that may be lost with a request that makes no progress between."""
    pinned_copies: int = 2
    copy_load: float = 16.0
    """Requests per slice on all nodes with a model, from which on another one gets a copy."""
    slack: float = 4.0
    """Requests per slice that a node may have more than the least loaded one with the model."""
    late_share: float = 0.5
    """Share of the target for the first token from which on a request leaves its usual node, and
    makes another copy if that is earlier. What is expected may be wrong by the rest."""
    hold_bytes_per_min: float = 20e9
    """Bytes that are loaded ahead of requests, for each node of the fleet."""
    prefix_blocks: int = 1_000_000
    """Blocks of prompts whose node is remembered."""


@value
class Destination:
    node_id: str
    cached: int
    """Prompt tokens whose KV is believed to be there."""
    late: bool = False
    """Its first token is expected late: on a node with the model late enough to look for another,
    on others after the target. What the model displaces there counts as time."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """What is expected of a node with the model."""

    book: NodeBook
    first_s: float
    paces: bool
    """A token takes no longer there than the target."""
    to: Destination

    def in_time(self, slo: Slo, share: float = 1.0) -> bool:
        return self.paces and self.first_s <= share * slo.ttft_s


def _open(order: list[NodeBook], spec: ModelSpec, closed: set[str]) -> Iterator[NodeBook]:
    """Yield the nodes that could load the model, from its own place in their order.

    Any few that follow each other here are spread over the whole order. Were they neighbours there,
    copies of popular models would crowd the nodes beside their places, and leave others idle."""
    nodes, place = len(order), crc32(spec.id.encode())
    step = max(1, int(nodes * _GOLDEN))
    while gcd(step, nodes) > 1:  # else some nodes would be left out
        step += 1
    for number in range(nodes):
        book = order[(place + number * step) % nodes]
        fits = not book.draining and spec.weight_bytes <= book.node.pool_bytes
        if fits and book.node.id not in closed:
            yield book


@dataclass(slots=True)
class FleetPlacement:
    """Chooses nodes. `nodes`: those that are up, by id, shared with the policy."""

    settings: FleetSettings
    nodes: dict[str, NodeBook]
    prefixes: CachedPrefixes
    pools: Pools
    _orders: dict[float, list[NodeBook]] = field(default_factory=dict[float, list[NodeBook]])
    """The nodes of each price by id, an order on which fronts agree; the cheapest first."""

    def add(self, book: NodeBook) -> None:
        self.nodes[book.node.id] = book
        if book.node.price not in self._orders:
            self._orders = dict(sorted([*self._orders.items(), (book.node.price, [])]))
        insort(self._orders[book.node.price], book, key=_id_of)

    def remove(self, node_id: str) -> NodeBook | None:
        book = self.nodes.pop(node_id, None)
        if book is not None:
            order = self._orders[book.node.price]
            del order[bisect_left(order, node_id, key=_id_of)]
            if not order:
                del self._orders[book.node.price]
            self.pools.lose(book)
        return book

    def node_for(
        self, request: Request, spec: ModelSpec, excluded: Iterable[str], now: float
    ) -> Destination | None:
        """Return where the request goes, None if no node is open.

        Nodes with the model come first, the cheapest of those that meet the targets. Among equally
        cheap ones its conversation's node is preferred, then the first in the model's own order,
        so that rare models stay in one pool. A node is passed over when it is late or has much more
        to do than another one with the model. If all with the model are late, a node that has to
        load it first may be earlier."""
        usual, blocks = self.prefixes.find(request, spec.id, self.nodes)
        # At least one token is computed.
        cached = min(blocks * BLOCK_TOKENS, request.prompt_len - 1)
        closed = set(excluded)
        holders = [one for one in self.pools.holders(spec.id) if one.node.id not in closed]
        found = self._holder(request, spec, holders, (usual, cached), now)
        if found is not None and found.in_time(request.slo, self.settings.late_share):
            return found.to
        closed.update(book.node.id for book in holders)
        new = self.newcomer(spec, closed, now, (request.slo, request.prompt_len))
        if new is not None:
            displacement_s = self.pools.displacement_s(new, spec, now)
            late_s = new.first_token_s(request, spec, 0, now) + displacement_s
            # A copy takes the place of other models only if the target would be missed.
            worth = found is None or not displacement_s or not found.in_time(request.slo)
            if worth and (found is None or late_s < found.first_s):
                return Destination(new.node.id, 0, late_s > request.slo.ttft_s)
        return None if found is None else found.to

    def _holder(
        self, request: Request, spec: ModelSpec, holders: list[NodeBook], usual: tuple[str, int],
        now: float,
    ) -> _Expected | None:  # fmt: skip
        """Return the cheapest node with the model that meets the targets. If none does, it is the
        one that is expected to answer first."""
        if len(self._orders) == 1:
            return self._best(request, spec, holders, usual, now) if holders else None
        prices = dict[float, list[NodeBook]]()
        for book in holders:
            prices.setdefault(book.node.price, []).append(book)
        late: list[_Expected] = []
        for price in sorted(prices):
            found = self._best(request, spec, prices[price], usual, now)
            if found.in_time(request.slo, self.settings.late_share):
                return found
            late.append(found)
        return min(late, key=lambda one: (not one.paces, one.first_s), default=None)

    def _best(
        self, request: Request, spec: ModelSpec, holders: list[NodeBook], usual: tuple[str, int],
        now: float,
    ) -> _Expected:  # fmt: skip
        """Return the best of some equally cheap nodes with the model."""
        settings, alike = self.settings, len(self._orders) == 1
        name, cached = usual

        def expected(book: NodeBook) -> _Expected:
            at = cached if book.node.id == name else 0
            first_s = book.first_token_s(request, spec, at, now)
            # Where all nodes are alike, no other one would be faster.
            paces = alike or book.speeds.of(spec, now)[1] <= request.slo.tpot_s
            late = first_s > settings.late_share * request.slo.ttft_s
            return _Expected(book, first_s, paces, Destination(book.node.id, at, late))

        first = self.nodes.get(name)
        there = [book for book in holders if spec.id in book.held] or holders
        if first not in holders:
            first = min(there, key=lambda book: rank(spec.id, book.node.id))
        usual_one = expected(first)
        most = min(book.load for book in there) + settings.slack
        if first.load <= most and usual_one.first_s <= settings.late_share * request.slo.ttft_s:
            return usual_one
        return min(
            (expected(book) for book in holders if book.load <= most),
            key=lambda one: (one.first_s, rank(spec.id, one.book.node.id)),
        )

    def newcomer(
        self, spec: ModelSpec, closed: Iterable[str], now: float,
        targets: tuple[Slo, float] | None = None,
    ) -> NodeBook | None:  # fmt: skip
        """Return where a model would be loaded at least cost.

        `targets`: those of the requests, and the tokens of their prompts; else the model's own.
        Nodes that meet them come first; of these, nodes where it displaces nothing; of these, the
        cheapest. If no node meets them, it is the one that would answer first."""
        closed = {*closed}
        if len(self._orders) == 1:
            [order] = self._orders.values()
            return self._least(order, spec, closed, now)
        slo, tokens = targets or (spec.slo, self.pools.prompt_tokens(spec.id))
        best: tuple[tuple[float, ...], NodeBook] | None = None
        for price, order in self._orders.items():
            book = self._least(order, spec, closed, now)
            if book is None:
                continue
            if book.suits(spec, slo, tokens, now):
                key = (0.0, float(self.pools.displacement_s(book, spec, now) > 0.0), price)
            else:
                key = (1.0, book.newcomer_s(spec) + tokens * book.speeds.of(spec, now)[0], price)
            if best is None or key < best[0]:
                best = key, book
            if key[:2] == (0.0, 0.0):
                break
        return None if best is None else best[1]

    def astray(self, book: NodeBook, request: Request, spec: ModelSpec, now: float) -> bool:
        """Whether the request's model may belong on a node of another price."""
        if len(self._orders) == 1:
            return False
        dear = book.node.price > next(iter(self._orders))
        return dear or not book.suits(spec, request.slo, request.prompt_len, now)

    def better(self, spec: ModelSpec, holders: Iterable[NodeBook], now: float) -> NodeBook | None:
        """Return a node where the model belongs by its price: no node with it meets its targets, or
        this one meets them for less."""
        if len(self._orders) <= 1:
            return None
        tokens = self.pools.prompt_tokens(spec.id)
        suiting = [one.node.price for one in holders if one.suits(spec, spec.slo, tokens, now)]
        new = self.newcomer(spec, [one.node.id for one in holders], now)
        if new is None or not new.suits(spec, spec.slo, tokens, now):
            return None
        return new if new.node.price < min(suiting, default=float("inf")) else None

    def _least(
        self, order: list[NodeBook], spec: ModelSpec, closed: set[str], now: float
    ) -> NodeBook | None:
        """Return the node with the least of these, among equally cheap ones: what waits there, the
        load, and what it displaces. Of equal ones it is the one that displaces least, then the
        first in the model's own order."""
        costs = [
            (round(book.newcomer_s(spec) / _EQUAL_S), rank(spec.id, book.node.id), book)
            for book in islice(_open(order, spec, closed), _SEARCHED_MAX)
        ]

        def whole(cost: tuple[int, int, NodeBook]) -> tuple[int, float, int]:
            displacement_s = self.pools.displacement_s(cost[2], spec, now)
            return cost[0] + round(displacement_s / _EQUAL_S), displacement_s, cost[1]

        cheapest = nsmallest(_COMPARED_MAX, costs, key=lambda cost: cost[:2])
        found = min(cheapest, key=whole, default=None)
        return None if found is None else found[2]

    def source(self, model: str, book: NodeBook) -> str:
        """Return the node to load a model from: the least loaded one that has it. It is empty if
        this node has the model, or no node has."""
        if book.has(model):
            return ""
        found = min(
            (one for one in self.pools.with_model(model) if model in one.held),
            key=lambda one: (one.draining, one.load, rank(model, one.node.id)), default=None,
        )  # fmt: skip
        return "" if found is None else found.node.id
