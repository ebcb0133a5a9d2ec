"""What a slice's policy is composed of: parts with more than one implementation.

                    a live slice                    simulations and baselines
    memory          `weights.weight_swapping`,      the same
                    or weights are read in place
    prefill_budget  `batching.headroom_budget`      `baselines.c2cserve.chunk_budgets`
    rank            least headroom first            order of arrival
    lookahead       none: one step per decision     `simulated.lookahead`
    gemm_control    none                            `baselines.c2cserve.alpha`

`ExtraT` is the type of the actions that these parts add to `actions.SliceAction`. A live slice adds
none, so a live executor is never handed an action that it cannot carry out.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Never, Protocol, TypeVar

from c2cserve.core.actions import Fetch, Release, RunStep
from c2cserve.core.events import GemmsMeasured
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.policy.headroom import next_turn
from c2cserve.policy.slice.batching import (
    BY_HEADROOM,
    ActiveModel,
    PrefillBudget,
    Seq,
    StepInFlight,
    headroom_budget,
)
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.slice.rotation import RotationSettings
from c2cserve.policy.weights.weight_swapping import WeightSwapping

ExtraT = TypeVar("ExtraT")
ExtraT_co = TypeVar("ExtraT_co", covariant=True)

Candidate = tuple[float, int, str]
"""A model that may run next, as `headroom.next_turn` takes it."""


class WeightMemory(Protocol):
    """Decides which models' weights lie in the slice's memory, beside KV."""

    @property
    def wakeup(self) -> float | None:
        """When `plan` has to be asked again, in clock seconds."""
        ...

    def computes(self, name: str) -> bool:
        """Whether steps of the model find their weights now."""
        ...

    def capacity(self, model: ActiveModel) -> int:
        """Blocks of KV that the model could have at most, beside its own weights."""
        ...

    def activated(self, model: ActiveModel, spec: ModelSpec) -> None:
        """The model's weights are to be resident as a whole (`events.Activated.keep`)."""
        ...

    def deactivated(self, name: str) -> None: ...

    def fetched(self, name: str, took_s: float) -> None: ...

    def refused(self, name: str) -> None:
        """The weights are not resident: no place was found for them, or KV has taken it."""
        ...

    def requested(self, name: str, now: float) -> None:
        """A request for the model has arrived."""
        ...

    def plan(self, now: float, in_flight: Collection[str]) -> Sequence[Fetch | Release]:
        """Return loads to begin and weights to release. `in_flight`: models with steps under
        way, whose weights must stay."""
        ...

    def turn(
        self, candidates: Sequence[Candidate], now: float, late_ran: bool
    ) -> tuple[bool, str] | None:
        """Return which model runs next, as `headroom.next_turn` does."""
        ...

    def make_room(
        self, model: ActiveModel, in_flight: Collection[str], now: float
    ) -> Sequence[Fetch | Release]:
        """Release weights of other models for KV of this one. Empty: none can go."""
        ...

    def break_deadlock(self) -> Sequence[Fetch | Release]:
        """Nothing is in flight and nothing could be launched: load a model that waits."""
        ...


class WeightsInPlace:
    """Steps read weights where they lie: every model computes. So it is on CPU slices."""

    wakeup: None = None

    def __init__(self, arena: KvArena) -> None:
        self._arena = arena

    def computes(self, name: str) -> bool:
        return True

    def capacity(self, model: ActiveModel) -> int:
        return self._arena.capacity(model.key)

    def activated(self, model: ActiveModel, spec: ModelSpec) -> None:
        raise AssertionError(f"{spec.id}: this slice keeps no weights as a whole")

    def deactivated(self, name: str) -> None:
        pass

    def fetched(self, name: str, took_s: float) -> None:
        pass

    def refused(self, name: str) -> None:
        pass

    def requested(self, name: str, now: float) -> None:
        pass

    def plan(self, now: float, in_flight: Collection[str]) -> Sequence[Never]:
        return ()

    def turn(
        self, candidates: Sequence[Candidate], now: float, late_ran: bool
    ) -> tuple[bool, str] | None:
        return next_turn(candidates, now, late_ran)

    def make_room(
        self, model: ActiveModel, in_flight: Collection[str], now: float
    ) -> Sequence[Never]:
        return ()

    def break_deadlock(self) -> Sequence[Never]:
        return ()


@dataclass(frozen=True, slots=True)
class DecidedSteps:
    """Several decode steps that were decided at once."""

    in_flight: list[StepInFlight]
    """One for each model that runs."""
    run: RunStep
    late: bool
    """Whether the last of them is a late model's."""


class Lookahead(Protocol):
    """Decides several decode steps at once where single decisions would come to the same."""

    def decide(
        self, models: Sequence[ActiveModel], step_ids: Iterator[int], now: float, late_ran: bool
    ) -> DecidedSteps | None: ...


class GemmControl(Protocol[ExtraT_co]):
    """Adjusts how GEMMs are computed, by what was measured of them."""

    def sample(self, event: GemmsMeasured, budget_s: float) -> Sequence[ExtraT_co]: ...


@dataclass(frozen=True, slots=True)
class SliceStrategies(Generic[ExtraT_co]):
    arena: KvArena
    memory: WeightMemory
    prefill_budget: PrefillBudget = headroom_budget
    rank: Callable[[Seq], float] = BY_HEADROOM
    rotation: RotationSettings | None = None
    """None: KV stays in the arena, and preempted requests begin again."""
    lookahead: Lookahead | None = None
    gemm_control: GemmControl[ExtraT_co] | None = None


def arena_of(slice_: Slice) -> KvArena:
    """Return the empty arena of a slice. On GPUs, what KV leaves of it is for weights."""
    cached_bytes = None if slice_.gpu is None else slice_.kv_bytes // 2
    return KvArena(slice_.kv_bytes, slice_.slab_bytes, cached_bytes)


def live_strategies(slice_: Slice) -> SliceStrategies[Never]:
    """Return what a server runs. Weights are swapped where memory and link are known, and KV
    rotates where the slice has host memory for it."""
    arena = arena_of(slice_)
    memory: WeightMemory = WeightsInPlace(arena)
    if slice_.swaps_weights:
        arena.weights_above = True
        memory = WeightSwapping(arena, slice_, rotates=True)
    rotation = RotationSettings() if slice_.host_kv_bytes else None
    return SliceStrategies(arena, memory, rotation=rotation)
