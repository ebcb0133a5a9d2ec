"""Which slice takes a request: an active instance, else an idle slice, else the least valuable
model makes room. The first form of C2CServe section 6.2, where links are not yet the limit."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from c2cserve.core.machine import Slice


@dataclass(slots=True)
class SliceLoad:
    slice: Slice
    active: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Model -> its requests dispatched here."""
    step_s: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> lately measured seconds of a decode step here."""

    @property
    def requests(self) -> int:
        return sum(map(len, self.active.values()))

    @property
    def limit(self) -> int:
        """Requests dispatched here at most; the rest waits at the controller, where it can still
        go to any slice."""
        return 2 * self.slice.max_batch

    def round_s(self) -> float:
        """A decode step of every model that runs here: the time between a request's tokens."""
        return sum(self.step_s.get(name, 0.0) for name, running in self.active.items() if running)


@dataclass(frozen=True, slots=True)
class Placement:
    slice_id: str
    activate: bool
    deactivate: str | None = None


def place(
    model: str, tpot_s: float, slices: Iterable[SliceLoad], value: dict[str, tuple[float, ...]]
) -> Placement | None:
    """Where a request of `model` should go; None: nowhere now.

    `value` orders models by what it costs to let them go (lowest first); models with requests on a
    slice are never deactivated there.
    """
    loads = sorted(slices, key=lambda load: (load.requests, load.slice.id))
    open_ = [load for load in loads if load.requests < load.limit]
    here = [load for load in open_ if model in load.active]
    idle = [load for load in open_ if load.requests == 0]
    for load in (load for load in idle if load in here):
        return Placement(load.slice.id, activate=False)
    for load in idle:
        if (placement := _activation(model, load, value)) is not None:
            return placement
    # The largest batch that still keeps the pace: full batches use weights best.
    fitting = [x for x in here if x.requests < x.slice.max_batch and x.round_s() <= tpot_s]
    if fitting:
        best = max(fitting, key=lambda load: (len(load.active[model]), -load.requests))
        return Placement(best.slice.id, activate=False)
    for load in open_:
        if (placement := _activation(model, load, value)) is not None:
            return placement
    return None


def _activation(
    model: str, load: SliceLoad, value: dict[str, tuple[float, ...]]
) -> Placement | None:
    """Activate the model there, letting the least valuable unused one go if the slice is full."""
    if model in load.active:
        return Placement(load.slice.id, activate=False)
    if len(load.active) < load.slice.max_active:
        return Placement(load.slice.id, activate=True)
    unused = [name for name, running in load.active.items() if not running]
    if not unused:
        return None
    victim = min(unused, key=lambda name: (*value[name], name))
    return Placement(load.slice.id, activate=True, deactivate=victim)
