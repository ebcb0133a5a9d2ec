"""Weights in a slice's memory: whole models first, and layers of streaming models in the rest."""

from typing import cast

from c2cserve.policy.weights.hbm_residency import Residency
from c2cserve.sim.world.shapes import SimModel


class WeightCache:
    """The layers of each model in a slice's memory, by `policy.weights.hbm_residency`.

    A step reads its other layers over the link. They are cached for the next step if there is room.
    """

    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes`: the memory that KV leaves."""
        self._budget_bytes = budget_bytes
        self._books = Residency(budget_bytes)
        self._layers: dict[str, set[int]] = {}
        self._whole: dict[str, int] = {}
        """Models that are resident as a whole -> bytes."""

    @property
    def held_bytes(self) -> int:
        """Bytes of models that are resident as a whole."""
        return sum(self._whole.values())

    def hold(self, model: SimModel) -> None:
        """Reserve memory for all weights of a model."""
        self.forget(model.spec.id)
        self._whole[model.spec.id] = model.spec.weight_bytes
        self._resize()

    def release(self, name: str) -> None:
        """Drop a model that was resident as a whole. Do nothing for others."""
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
        """Return the share of the model's weights that a step finds here, and cache the rest.

        `times` is the number of equal steps."""
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
        """Drop the cached layers of a model."""
        self._books.forget(name)
        self._layers.pop(name, None)
