"""Weights in a slice's memory: whole models first, and layers of streaming models in the rest.
Steps that use a whole model's layers as they arrive."""

from dataclasses import dataclass
from typing import cast

from c2cserve.core.step import Lane, Step
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
        """Models that are resident as a whole -> bytes,"""
        self.held_bytes = 0
        """and the bytes of all of them."""

    def hold(self, model: SimModel) -> None:
        """Reserve memory for all weights of a model."""
        self.forget(model.spec.id)
        assert model.spec.id not in self._whole, f"{model.spec.id} is here already"
        self._whole[model.spec.id] = model.spec.weight_bytes
        self.held_bytes += model.spec.weight_bytes
        self._resize()

    def release(self, name: str) -> None:
        """Drop a model that was resident as a whole. Do nothing for others."""
        size = self._whole.pop(name, None)
        if size is not None:
            self.held_bytes -= size
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


@dataclass(slots=True)
class _Arriving:
    lane: Lane
    begins_s: float
    """When its kernels can begin."""
    share: float
    """The part of the load's time in which its kernels run."""
    hidden_s: float | None = None
    """Seconds of its kernels at most that were over when the load was; None: the load is not."""


class ArrivingSteps:
    """Steps of models that are being loaded.

        load    | layer 0 | layer 1 | layer 2 | layer 3 |
        step              | 0 .     | 1 .     | 2 .     | 3 .     ends max(load, compute overlapped)

    Layers are of one size, and arrive evenly. When the load is over, what is left of the step is
    its last layer, or more if the step computes slower than weights arrive. Until then it takes its
    share of the time of others in its lane."""

    def __init__(self) -> None:
        self._steps: dict[int, _Arriving] = {}

    def __contains__(self, step_id: int) -> bool:
        return step_id in self._steps

    def begin(self, step: Step, begins_s: float, share: float) -> None:
        self._steps[step.id] = _Arriving(step.lane, begins_s, share)

    def arrived(self, step: Step, since_s: float, now: float, layers: int) -> None:
        """Note the end of a load that began at `since_s`."""
        if (one := self._steps.get(step.id)) is not None:
            first_s = since_s + (now - since_s) / layers
            one.hidden_s = max(0.0, now - max(one.begins_s, first_s))
            one.share = 1.0 / layers

    def dropped(self, step: Step) -> None:
        self._steps.pop(step.id, None)

    def left_s(self, step: Step, alone_s: float) -> float:
        """Return the seconds that are left of a step that begins now, or goes on."""
        one = self._steps.pop(step.id, None)
        if one is None or one.hidden_s is None:
            return alone_s
        return max(one.share * alone_s, alone_s - one.hidden_s)

    def slowdown(self, lane: Lane) -> float:
        """Return how many times as long other steps of a lane take beside those here."""
        if not self._steps:
            return 1.0
        under_way = (one for one in self._steps.values() if one.hidden_s is None)
        return 1.0 + sum(min(1.0, one.share) for one in under_way if one.lane == lane)
