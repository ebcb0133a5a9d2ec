"""What the pools of all nodes hold, how often it is asked for, and what a new model displaces."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from c2cserve.core.fleet import NodeReport
from c2cserve.core.model import ModelSpec
from c2cserve.policy.fleet.nodes import NodeBook
from c2cserve.policy.uses import Uses, note_use

_LEARNING = 0.1
"""Weight of the newest prompt."""
_NO_ROOM_S = 10.0
"""What a node costs whose models are all in use: one of them must become idle first."""
_LOAD_COST_S = 0.2
"""What a load costs beside its own time: it takes the link and processors from what runs there. So
pools keep what is asked for often where loads take no time worth waiting for, too."""


@dataclass(slots=True)
class Pools:
    """An index of models, and the rates of their requests as this front sees them."""

    specs: Mapping[str, ModelSpec]
    _holders: dict[str, dict[str, NodeBook]] = field(default_factory=dict[str, dict[str, NodeBook]])
    """Model -> the nodes that have or load it, by id."""
    _uses: dict[str, Uses] = field(default_factory=dict[str, Uses])
    _prompts: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> tokens of its prompts, on average over the last ones."""
    _began_s: float = 0.0
    """When the first of all requests came."""

    # ---- who has what ---------------------------------------------------------------------------

    def with_model(self, model: str) -> Iterable[NodeBook]:
        """Return the nodes that have the model or load it."""
        return self._holders.get(model, {}).values()

    def holders(self, model: str) -> Sequence[NodeBook]:
        """Return those of them that do not drain."""
        return [book for book in self.with_model(model) if not book.draining]

    def report(self, book: NodeBook, report: NodeReport, now: float) -> None:
        """Take over what a node says."""
        before = book.models()
        book.report(report, self.specs, now)
        after = book.models()
        for model in before - after:
            self._drop(model, book)
        for model in after - before:
            self._holders.setdefault(model, {})[book.node.id] = book

    def hold(self, book: NodeBook, spec: ModelSpec, now: float) -> None:
        """Note that the node is to have the model. What makes room for it is known when the node
        reports again."""
        if not book.has(spec.id):
            book.loading[spec.id] = now
            book.used_bytes += spec.weight_bytes
            self._holders.setdefault(spec.id, {})[book.node.id] = book

    def lose(self, book: NodeBook) -> None:
        for model in book.models():
            self._drop(model, book)

    def _drop(self, model: str, book: NodeBook) -> None:
        found = self._holders[model]
        found.pop(book.node.id, None)
        if not found:
            del self._holders[model]

    # ---- how often it is asked for --------------------------------------------------------------

    def asked(self, spec: ModelSpec, tokens: int, now: float) -> None:
        """Note a request, after its node was chosen."""
        if not self._uses:
            self._began_s = now
        note_use(self._uses, spec, now)
        before = self._prompts.get(spec.id, float(tokens))
        self._prompts[spec.id] = before + _LEARNING * (tokens - before)

    def used_s(self, model: str) -> tuple[float, ...]:
        """Return when the model was used last, on any node."""
        uses = self._uses.get(model)
        return () if uses is None else tuple(uses.times_s)

    def forget(self, model: str) -> None:
        self._uses.pop(model, None)
        self._prompts.pop(model, None)

    def prompt_tokens(self, model: str) -> float:
        """Return the tokens of the model's prompts, on average."""
        return self._prompts.get(model, 1.0)

    def per_s(self, model: str, now: float) -> float:
        """Return how often a model is asked for. One that never was is taken for one that was
        asked for once since the beginning."""
        uses = self._uses.get(model)
        return 1.0 / max(1e-3, now - self._began_s) if uses is None else uses.per_s(now)

    def displacement_s(
        self, book: NodeBook, spec: ModelSpec, now: float, *, instead: bool = False
    ) -> float:
        """Return what the new model costs others there, in seconds as `load_cost_s` counts them.

        A node evicts what is used least often, and that will be loaded again at its next request.
        If no node has the new model, one of the two is missing in any case. Then only the chance
        counts that the evicted one is asked for first: `v / (v + n)` by the rates of both. Another
        copy costs the whole load, unless it is to be used `instead` of the others. A model that
        other nodes have too costs nothing."""
        lacking = spec.weight_bytes + book.used_bytes - book.node.pool_bytes
        if lacking <= 0:
            return 0.0
        cost_s = 0.0
        another = spec.id in self._holders and not instead
        rate = 0.0 if another else self.per_s(spec.id, now)
        for model in book.victims(now):
            victim = self.specs.get(model)
            if victim is None:
                continue
            if len(self._holders[model]) == 1:
                other = self.per_s(model, now)
                chance = other / (other + rate) if rate else 1.0
                cost_s += chance * load_cost_s(book, victim)
            lacking -= victim.weight_bytes
            if lacking <= 0:
                return cost_s
        return cost_s + _NO_ROOM_S


def load_cost_s(book: NodeBook, spec: ModelSpec) -> float:
    """Return what it costs to load a model there."""
    return _LOAD_COST_S + book.loads.of(spec)
