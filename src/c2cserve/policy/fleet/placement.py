"""Which node a request goes to, and which node a model goes to."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import chain, islice
from zlib import crc32

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Request
from c2cserve.core.value import value
from c2cserve.policy.fleet.nodes import CachedPrefixes, NodeBook, rank
from c2cserve.policy.fleet.pools import Pools

_EQUAL_S = 0.01
"""Costs that differ by less are equal."""
_SEARCHED_MAX = 64
"""Nodes that are looked at for a new model. The best of 64 is among the best few of any fleet."""
_COMPARED_MAX = 16
"""Nodes whose pools are looked at for a new model: those that are cheapest beside that."""


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


@dataclass(slots=True)
class FleetPlacement:
    """Chooses nodes. `nodes`: those that are up, by id, shared with the policy."""

    settings: FleetSettings
    nodes: dict[str, NodeBook]
    prefixes: CachedPrefixes
    pools: Pools
    _order: list[NodeBook] = field(default_factory=list[NodeBook])
    """All nodes by id, an order on which fronts agree."""

    def add(self, book: NodeBook) -> None:
        self.nodes[book.node.id] = book
        insort(self._order, book, key=_id_of)

    def remove(self, node_id: str) -> NodeBook | None:
        book = self.nodes.pop(node_id, None)
        if book is not None:
            del self._order[bisect_left(self._order, node_id, key=_id_of)]
            self.pools.lose(book)
        return book

    def node_for(
        self, request: Request, spec: ModelSpec, excluded: Iterable[str], now: float
    ) -> Destination | None:
        """Return where the request goes, None if no node is open.

        Nodes with the model come first. Its conversation's node is preferred, then the first in the
        model's own order, so that rare models stay in one pool. A node is passed over when it is
        late or has much more to do than another one with the model. If all with the model are
        late, a node that has to load it first may be earlier."""
        usual, blocks = self.prefixes.find(request, spec.id, self.nodes)
        # At least one token is computed.
        cached = min(blocks * BLOCK_TOKENS, request.prompt_len - 1)
        closed = set(excluded)
        holders = [one for one in self.pools.holders(spec.id) if one.node.id not in closed]
        found = self._holder(request, spec, holders, (usual, cached), now)
        if found is not None and found[0] <= self.settings.late_share * request.slo.ttft_s:
            return found[1]
        closed.update(book.node.id for book in holders)
        new = self.newcomer(spec, closed, now)
        if new is not None and found is not None:
            displacement_s = self.pools.displacement_s(new, spec, now)
            # A copy takes the place of other models only if the target would be missed.
            worth = not displacement_s or found[0] > request.slo.ttft_s
            late_s = new.first_token_s(request, spec, 0, now) + displacement_s
            new = new if worth and late_s < found[0] else None
        if new is not None:
            return Destination(new.node.id, 0)
        return None if found is None else found[1]

    def _holder(
        self, request: Request, spec: ModelSpec, holders: list[NodeBook], usual: tuple[str, int],
        now: float,
    ) -> tuple[float, Destination] | None:  # fmt: skip
        """Return the best of the nodes with the model, and when its first token is expected."""
        if not holders:
            return None
        settings = self.settings
        name, cached = usual

        def expected(book: NodeBook) -> tuple[float, Destination]:
            at = cached if book.node.id == name else 0
            destination = Destination(book.node.id, at)
            return book.first_token_s(request, spec, at, now), destination

        first = self.nodes.get(name)
        there = [book for book in holders if spec.id in book.held] or holders
        if first not in holders:
            first = min(there, key=lambda book: rank(spec.id, book.node.id))
        first_s, destination = expected(first)
        most = min(book.load for book in there) + settings.slack
        if first.load <= most and first_s <= settings.late_share * request.slo.ttft_s:
            return first_s, destination
        return min(
            (expected(book) for book in holders if book.load <= most),
            key=lambda one: (one[0], rank(spec.id, one[1].node_id)),
        )

    def newcomer(self, spec: ModelSpec, closed: Iterable[str], now: float) -> NodeBook | None:
        """Return where the model would be loaded at least cost: what waits there, the load, and
        what it displaces. Of equal ones it is the one that displaces least, then the first in the
        model's own order."""
        costs = [
            (round(book.newcomer_s(spec) / _EQUAL_S), rank(spec.id, book.node.id), book)
            for book in islice(self._open(spec, {*closed}), _SEARCHED_MAX)
        ]

        def whole(cost: tuple[int, int, NodeBook]) -> tuple[int, float, int]:
            displacement_s = self.pools.displacement_s(cost[2], spec, now)
            return cost[0] + round(displacement_s / _EQUAL_S), displacement_s, cost[1]

        cheapest = nsmallest(_COMPARED_MAX, costs, key=lambda cost: cost[:2])
        found = min(cheapest, key=whole, default=None)
        return None if found is None else found[2]

    def _open(self, spec: ModelSpec, closed: set[str]) -> Iterator[NodeBook]:
        """Yield the nodes that could load the model, from its own place in their order."""
        begin = crc32(spec.id.encode()) % max(1, len(self._order))
        for book in chain(islice(self._order, begin, None), islice(self._order, begin)):
            fits = not book.draining and spec.weight_bytes <= book.node.pool_bytes
            if fits and book.node.id not in closed:
                yield book

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
