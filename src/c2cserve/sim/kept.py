"""Weights that stay in a slice's memory while they stream by."""

from typing import cast

from c2cserve.policy.residency import Residency
from c2cserve.sim.shapes import SimModel


class KeptWeights:
    """`policy.residency` at work: which layers of which model are kept. What a step reads besides
    comes over the link, and is kept for the next one where there is room."""

    def __init__(self, budget_bytes: int) -> None:
        self._books = Residency(budget_bytes)
        self._layers: dict[str, set[int]] = {}

    def all_of(self, model: SimModel) -> bool:
        return len(self._layers.get(model.spec.id, ())) == model.spec.layers

    def use(self, model: SimModel, now: float, times: int = 1) -> float:
        """The share of the model's weights that a step which begins now finds here. `times`: so
        many steps like it."""
        spec = model.spec
        for _ in range(times):
            self._books.used(spec.id, now, spec.priority)
        layers = self._layers.setdefault(spec.id, set())
        found = len(layers) / spec.layers
        if found < 1.0:
            size = spec.weight_bytes // spec.layers
            for layer in range(spec.layers):
                if layer in layers:
                    continue
                gone = self._books.admit(spec.id, (spec.id, layer), size, now)
                if gone is None:
                    break
                for name, lost in cast("list[tuple[str, int]]", gone):
                    self._layers[name].remove(lost)
                layers.add(layer)
        return found

    def forget(self, name: str) -> None:
        """The model's weights leave the host's pool."""
        self._books.forget(name)
        self._layers.pop(name, None)
