"""Weights in a slice's memory: of models that are kept there as a whole, and, in what they leave of
it, of models that stream by."""

from typing import cast

from c2cserve.policy.weights.hbm_residency import Residency
from c2cserve.sim.world.shapes import SimModel


class WeightCache:
    """`policy.weights.hbm_residency` at work: which layers of which model are kept. What a step
    reads besides comes over the link, and is kept for the next one where there is room."""

    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes`: what KV leaves."""
        self._budget_bytes = budget_bytes
        self._books = Residency(budget_bytes)
        self._layers: dict[str, set[int]] = {}
        self._whole: dict[str, int] = {}
        """Models that are kept as a whole -> bytes."""

    @property
    def held_bytes(self) -> int:
        """Of models that are kept as a whole."""
        return sum(self._whole.values())

    def hold(self, model: SimModel) -> None:
        """All of its weights will be here, whatever streams by."""
        self.forget(model.spec.id)
        self._whole[model.spec.id] = model.spec.weight_bytes
        self._resize()

    def release(self, name: str) -> None:
        """Its weights are like all others again, and gone; nothing if it was not held."""
        if self._whole.pop(name, None) is not None:
            self._resize()

    def _resize(self) -> None:
        gone = self._books.shrink(max(0, self._budget_bytes - self.held_bytes))
        for name, layer in cast("list[tuple[str, int]]", gone):
            self._layers[name].remove(layer)

    def all_of(self, model: SimModel) -> bool:
        name = model.spec.id
        return name in self._whole or len(self._layers.get(name, ())) == model.spec.layers

    def use(self, model: SimModel, now: float, times: int = 1) -> float:
        """The share of the model's weights that a step which begins now finds here. `times`: so
        many steps like it."""
        spec = model.spec
        if spec.id in self._whole:
            return 1.0
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
        """What was kept of the model as it streamed by is gone."""
        self._books.forget(name)
        self._layers.pop(name, None)
