"""Which weights stay in a slice's HBM (ours, DESIGN "Weights on a slice").

HBM that KV does not need is a cache of weights. Keeping a weight saves its bytes on the link at
each use. So a byte of HBM is worth how often its model runs, weighed by priority. A weight is taken
in as it streams by, if there is room, or room can be made of weights worth clearly less. Dropping
one costs nothing: host memory has it. Within one model all weights are worth the same, so a model
larger than the cache keeps what it has: taking turns would save nothing."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from math import exp2

HALF_LIFE_S = 30.0
"""The half-life of a use's weight: traffic that stopped this long ago counts half."""
MARGIN = 1.5
"""How much more a model must be worth before its weights displace another's. Models of like traffic
would displace each other for ever, and each exchange costs link bytes."""


@dataclass(slots=True)
class _Model:
    uses: float = 0.0
    seen_s: float = 0.0
    weight: float = 1.0
    sizes: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    """Its weights in the cache."""

    def worth(self, now: float) -> float:
        return self.weight * self.uses * exp2((self.seen_s - now) / HALF_LIFE_S)


class Residency:
    """Books of one slice's weight cache. Keys are whatever names a weight."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._models: dict[str, _Model] = {}

    def used(self, model: str, now: float, priority: int = 0) -> None:
        """A step of the model runs."""
        book = self._models.setdefault(model, _Model())
        book.uses = 1.0 + book.uses * exp2((book.seen_s - now) / HALF_LIFE_S)
        book.seen_s, book.weight = now, 1.0 + max(0, priority)

    def admit(self, model: str, key: Hashable, size: int, now: float) -> list[Hashable] | None:
        """Take a weight in that streams by. None: it is not kept. Else what must go for it."""
        victims = self._victims(model, key, size, now)
        if victims is None:
            return None
        for other, victim in victims:
            self.used_bytes -= other.sizes.pop(victim)
        self._models[model].sizes[key] = size
        self.used_bytes += size
        return [victim for _, victim in victims]

    def would_admit(
        self, model: str, key: Hashable, size: int, now: float
    ) -> list[Hashable] | None:
        """What `admit` would say."""
        victims = self._victims(model, key, size, now)
        return None if victims is None else [victim for _, victim in victims]

    def _victims(
        self, model: str, key: Hashable, size: int, now: float
    ) -> list[tuple[_Model, Hashable]] | None:
        book = self._models.setdefault(model, _Model())
        if key in book.sizes or size > self.budget_bytes:
            return None
        lacking = self.used_bytes + size - self.budget_bytes
        victims: list[tuple[_Model, Hashable]] = []
        for other in self._cheapest() if lacking > 0 else []:
            if other is book or other.worth(now) * MARGIN >= book.worth(now):
                continue
            for victim, freed in other.sizes.items():
                if lacking > 0:
                    victims.append((other, victim))
                    lacking -= freed
        return victims if lacking <= 0 else None

    def shrink(self, budget_bytes: int) -> list[Hashable]:
        """KV needs room, or gives some back: what must go at once, the least worthy first."""
        self.budget_bytes = budget_bytes
        gone: list[Hashable] = []
        if self.used_bytes <= budget_bytes:
            return gone
        for book in self._cheapest():
            while book.sizes and self.used_bytes > budget_bytes:
                key, size = book.sizes.popitem()
                self.used_bytes -= size
                gone.append(key)
        return gone

    def drop(self, key: Hashable) -> None:
        """A weight is gone: KV has taken its place, or none was found for it."""
        for book in self._models.values():
            if (size := book.sizes.pop(key, None)) is not None:
                self.used_bytes -= size
                return

    def forget(self, model: str) -> list[Hashable]:
        """The model leaves the slice for good: what of it was kept."""
        book = self._models.pop(model, None)
        if book is None:
            return []
        self.used_bytes -= sum(book.sizes.values())
        return list(book.sizes)

    def worth(self, model: str, now: float) -> float:
        """What keeping a byte of the model is worth, against other models at the same time."""
        return self._models[model].worth(now) if model in self._models else 0.0

    def resident_bytes(self, model: str) -> int:
        return sum(self._models[model].sizes.values()) if model in self._models else 0

    def _cheapest(self) -> Iterable[_Model]:
        """Models by worth, compared at one time."""
        now = max((book.seen_s for book in self._models.values()), default=0.0)
        return nsmallest(len(self._models), self._models.values(), key=lambda b: b.worth(now))
