"""What a plan has found, and what was asked of it."""

from dataclasses import asdict, dataclass
from typing import Any

from c2cserve.sim.planning.trials import Trial

_HELPS = 0.002
"""Share of all requests. A resource that helps fewer is not the bottleneck."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    what: str
    attainment: float
    """Attainment with half as much again of the resource, over the first seeds of the trial,"""
    before: float
    """and without, over the same seeds."""
    seeds: int = 1

    @property
    def gain(self) -> float:
        return self.attainment - self.before


@dataclass(frozen=True, slots=True)
class Dedicated:
    """The same catalogue with GPUs of its own for each model."""

    gpus: int
    shared_gpus: int
    """Those of the planned machine."""
    cost: float | None
    """A month's, with the price that was given; None: none was."""
    shared_cost: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    trials: tuple[Trial, ...]
    """All trials in the order they were made."""
    best: Trial | None
    """The largest catalogue that passed, or the first machine that did; None: nothing passed."""
    beyond: Trial | None
    """The trial that failed by least beyond it; None: nothing failed."""
    bottlenecks: tuple[Bottleneck, ...]
    """Experiments on `beyond`, one for each resource."""
    grows: bool
    """Whether more models meant more requests."""
    most: int = 0
    """The most models that a search may try; 0: nothing was searched."""
    layouts: tuple[Trial, ...] = ()
    """`best` on the machine's other layouts, if they were asked for."""
    spare: Trial | None = None
    """`best` with one GPU less, if that was asked for and one is left."""
    dedicated: Dedicated | None = None
    without_relays: Trial | None = None
    """`best` with one link for each GPU, if the plan is of GPUs that relay for each other."""
    missing: tuple[str, ...] = ()
    """What was asked for besides and cannot be had, in sentences."""

    @property
    def binds(self) -> str:
        """The bottleneck (`sim.planning.bottleneck`), or "" if no single resource helps."""
        if self.beyond is None or not self.bottlenecks:
            return ""
        seeds = max(one.seeds for one in self.bottlenecks)
        closest = (one for one in self.bottlenecks if one.seeds == seeds)
        most = max(closest, key=lambda one: one.gain)
        return most.what if most.gain > _HELPS else ""

    def as_json(self) -> dict[str, Any]:
        """Return the plan for `--json`, where the key of `bottlenecks` is "reliefs"."""
        fields = asdict(self)
        named = {"reliefs" if key == "bottlenecks" else key: fields[key] for key in fields}
        return {**named, "binds": self.binds}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a plan has besides its answer."""

    seeds: int = 1
    layouts: bool = False
    """The answer on the machine's other layouts."""
    spare: bool = False
    """The answer with one GPU less (N+1)."""
    gpu_month: float | None = None
    """Price of a GPU for a month, in any currency."""
