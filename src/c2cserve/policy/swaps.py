"""Which models' weights are in a slice's memory where the link is too slow to stream them within a
token's time (ours; "host memory is home, HBM is a cache", by whole models).

A model with requests needs its weights only in bursts. While they are here, its steps run faster
than its clients' pace and gain headroom (SLINFER equation 1: tokens are due one TPOT after the
other, whenever they were drawn), and that headroom is time in which others can have the memory: its
KV stays. So a slice serves as many models as its compute and its link carry, not as its memory
holds. One model comes at a time, the most urgent one, once it needs to: when its headroom is about
what the transfer takes. For it those leave that have most headroom, and none that is as urgent.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

LEAD = 3.0
"""How many times its transfer's length before it is late a model starts to come: others may be on
the link before it."""
MARGIN_S = 0.5
"""Who leaves has at least so much more headroom than who comes: else two would displace each other
for a token each."""


@dataclass(frozen=True, slots=True)
class Swap:
    model: str
    leaving: tuple[str, ...]


class Swaps:
    """Books of one slice's memory for weights."""

    def __init__(self, budget_bytes: int, link_bytes_per_s: float) -> None:
        self.budget_bytes = budget_bytes
        self._link_bytes_per_s = link_bytes_per_s
        self._here: dict[str, int] = {}
        """Model -> bytes; the one that comes is among them."""
        self.coming: str | None = None
        self.used_bytes = 0

    def has(self, model: str) -> bool:
        return model in self._here and model != self.coming

    def arrived(self) -> None:
        self.coming = None

    def forget(self, model: str) -> None:
        """Its weights go; nothing if they are not here."""
        self.used_bytes -= self._here.pop(model, 0)
        if self.coming == model:
            self.coming = None

    def needed_s(self, size: int, due_s: float) -> float:
        """From when on a model must come whose next token is due then."""
        return due_s - LEAD * size / self._link_bytes_per_s

    def next(
        self, wanted: Mapping[str, int], due_s: Mapping[str, float], busy: Set[str], now: float
    ) -> Swap | None:
        """Who comes now, and who leaves for it. `wanted`: models with steps that wait for their
        weights -> bytes; `due_s`: when each model's most urgent token is due, of those that have
        requests; `busy`: models that compute just now."""
        if self.coming is not None:
            return None
        # Who is late already is not the one who can be helped.
        for model in sorted(wanted, key=lambda n: (due_s.get(n, now) < now, due_s.get(n, now), n)):
            leaving = self._leaving(wanted[model], due_s.get(model, now), due_s, busy, now)
            if leaving is not None:
                for name in leaving:
                    self.forget(name)
                self._here[model] = wanted[model]
                self.used_bytes += wanted[model]
                self.coming = model
                return Swap(model, tuple(leaving))
        return None

    def _leaving(
        self, size: int, own_s: float, due_s: Mapping[str, float], busy: Set[str], now: float
    ) -> list[str] | None:
        """Who makes room for a model of this size whose next token is due at `own_s`; None: it does
        not come now."""
        lacking = self.used_bytes + size - self.budget_bytes
        if lacking > 0 and now < self.needed_s(size, own_s):
            return None
        leaving: list[str] = []
        others = [name for name in self._here if name not in busy]
        for name in sorted(others, key=lambda name: (-due_s.get(name, float("inf")), name)):
            if lacking <= 0 or due_s.get(name, float("inf")) < own_s + MARGIN_S:
                break
            leaving.append(name)
            lacking -= self._here[name]
        return leaving if lacking <= 0 else None
