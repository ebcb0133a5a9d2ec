"""How many copies of a model there are, and which are loaded before they are asked for."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest

from c2cserve.core.fleet import Hold
from c2cserve.core.model import ModelSpec
from c2cserve.policy.fleet.nodes import rank
from c2cserve.policy.fleet.placement import FleetPlacement
from c2cserve.policy.fleet.pools import load_cost_s

_CHECK_S = 0.1
_CHECKED_MAX = 4
"""Models that are looked at in one decision: each takes a pass over all nodes."""
_CLEAR = 1.0 / 3.0
"""Chance that what a copy displaces is asked for first. At a third, its rate is half as high."""
_DEMAND_S = 300.0
"""A model that was asked for within this time comes back when its last node is lost."""
_CROWDED_S = 1.0
"""A model of which a request was refused within this time gets another copy where there is room."""


@dataclass(slots=True)
class Copies:
    """Keeps pinned models in several pools and gives hot ones another copy. Brings models to nodes
    of the price where they belong, and brings back those whose nodes were lost."""

    placement: FleetPlacement
    models: Mapping[str, ModelSpec]
    asked_s: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> when it was last asked for."""
    crowded_s: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> when a request was last refused because all nodes with it had too much to do."""
    _due: dict[str, None] = field(default_factory=dict[str, None])
    """Models to look at, oldest first."""
    _budget_bytes: float = 0.0
    _budget_s: float | None = None
    _next_s: float = 0.0

    @property
    def wakeup(self) -> float | None:
        return self._next_s if self._due else None

    def review(self, models: Iterable[str]) -> None:
        """Check these models' copies soon. Those that were removed are left out."""
        self._due.update(dict.fromkeys(one for one in models if one in self.models))

    def forget(self, model: str) -> None:
        self._due.pop(model, None)
        self.asked_s.pop(model, None)
        self.crowded_s.pop(model, None)

    def holds(self, now: float) -> Iterator[Hold]:
        """Yield what to load where, within the budget."""
        if not self._due or now < self._next_s:
            return
        per_min = self.placement.settings.hold_bytes_per_min * len(self.placement.nodes)
        if self._budget_s is None:
            self._budget_bytes = per_min
        else:
            earned = (now - self._budget_s) * per_min / 60.0
            self._budget_bytes = min(per_min, self._budget_bytes + earned)
        self._budget_s = now
        for model in list(self._due)[:_CHECKED_MAX]:
            spec = self.models[model]
            # A model larger than a minute's budget waits until the budget is whole.
            if min(spec.weight_bytes, per_min) > self._budget_bytes:
                break
            del self._due[model]
            yield from self._copy(spec, now)
        self._next_s = now + _CHECK_S

    def _pins(self, spec: ModelSpec, now: float) -> Iterator[Hold]:
        """Pin the model on the first nodes of its own order, on which all fronts agree."""
        fitting = (book for book in self.placement.nodes.values() if book.may_pin(spec))
        copies = self.placement.settings.pinned_copies
        for node in nsmallest(copies, fitting, key=lambda book: rank(spec.id, book.node.id)):
            if spec.id in node.pinned:
                continue
            source = self.placement.source(spec.id, node)
            if not (source or node.has(spec.id)) and self.placement.pools.holders(spec.id):
                self._due[spec.id] = None  # it is loaded elsewhere: this copy comes from there
                return
            node.pinned[spec.id] = spec.weight_bytes
            if not node.has(spec.id):
                self.placement.pools.hold(node, spec, now)
                self._budget_bytes -= spec.weight_bytes
            yield Hold(node.node.id, spec.id, source, pinned=True)

    def _copy(self, spec: ModelSpec, now: float) -> Iterator[Hold]:
        if spec.pinned:
            yield from self._pins(spec, now)
        holders = self.placement.pools.holders(spec.id)
        node, instead = self.placement.better(spec, holders, now) if holders else None, True
        if node is None and len(holders) < self._wanted(spec, now):
            closed = [book.node.id for book in holders]
            node, instead = self.placement.newcomer(spec, closed, now), False
        if node is None:
            return
        displacement_s = self.placement.pools.displacement_s(node, spec, now, instead=instead)
        if displacement_s > _CLEAR * load_cost_s(node, spec):
            return  # only what is clearly rarer is displaced
        busy = min((book.load for book in holders), default=float("inf"))
        if not instead and node.load > busy / 2.0:
            return  # a hot model's copy must relieve its nodes
        source = self.placement.source(spec.id, node)
        self.placement.pools.hold(node, spec, now)
        self._budget_bytes -= spec.weight_bytes
        yield Hold(node.node.id, spec.id, source)
        self._due[spec.id] = None  # it may need more than one

    def _wanted(self, spec: ModelSpec, now: float) -> int:
        """Return how many copies there should be."""
        settings, holders = self.placement.settings, self.placement.pools.holders(spec.id)
        wanted = int(now - self.asked_s.get(spec.id, float("-inf")) < _DEMAND_S)
        crowded = now - self.crowded_s.get(spec.id, float("-inf")) < _CROWDED_S
        if holders and (crowded or min(book.load for book in holders) > settings.copy_load):
            wanted = max(wanted, len(holders) + 1)
        return wanted
