"""What a slice's policy is composed of: parts with more than one implementation.

                    a live slice                    simulations and baselines
    memory          weights are read in place       `simulated.weight_swapping`
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

from c2cserve.core.actions import RunStep
from c2cserve.core.events import GemmsMeasured
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.policy.headroom import Candidate, next_turn
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

ExtraT = TypeVar("ExtraT")
ExtraT_co = TypeVar("ExtraT_co", covariant=True)


class WeightMemory(Generic[ExtraT_co]):
    """Decides which models' weights lie in the slice's memory, beside KV. Here no model's do: steps
    read weights where they lie, and the executor caches them."""

    wakeup: float | None = None
    """When `plan` has to be asked again, in clock seconds."""

    def __init__(self, arena: KvArena) -> None:
        self._arena = arena

    def computes(self, name: str) -> bool:
        """Return whether steps of the model find their weights now."""
        return True

    def capacity(self, model: ActiveModel) -> int:
        """Return the blocks of KV that the model could have at most, beside its own weights."""
        return self._arena.capacity(model.key)

    def activated(self, model: ActiveModel, spec: ModelSpec) -> None:
        """Note that the model's weights are to be resident as a whole (`events.Activated.keep`)."""
        raise AssertionError(f"{spec.id}: this slice keeps no weights as a whole")

    def deactivated(self, name: str) -> None: ...

    def fetched(self, name: str, took_s: float) -> None: ...

    def requested(self, name: str, now: float) -> None:
        """Note that a request for the model has arrived."""

    def plan(self, now: float, in_flight: Collection[str]) -> Sequence[ExtraT_co]:
        """Return loads to begin and weights to release. `in_flight`: models with steps under
        way, whose weights must stay."""
        return ()

    def turn(
        self, candidates: Sequence[Candidate[str]], now: float, late_ran: bool
    ) -> tuple[bool, str] | None:
        """Return which model runs next, as `headroom.next_turn` does."""
        return next_turn(candidates, now, late_ran)

    def make_room(
        self, model: ActiveModel, in_flight: Collection[str], now: float
    ) -> Sequence[ExtraT_co]:
        """Release weights of other models for KV of this one. Empty: none can go."""
        return ()

    def break_deadlock(self) -> Sequence[ExtraT_co]:
        """Load a model that waits, because nothing is in flight and nothing could be launched."""
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
    memory: WeightMemory[ExtraT_co]
    prefill_budget: PrefillBudget = headroom_budget
    rank: Callable[[Seq], float] = BY_HEADROOM
    rotation: RotationSettings | None = None
    """None: KV stays in the arena, and preempted requests begin again."""
    lookahead: Lookahead | None = None
    gemm_control: GemmControl[ExtraT_co] | None = None


def arena_of(slice_: Slice) -> KvArena:
    """Return the empty arena of a slice. On GPUs, what KV leaves of it is a cache of weights."""
    cached_bytes = None if slice_.gpu is None else slice_.kv_bytes // 2
    return KvArena(slice_.kv_bytes, slice_.slab_bytes, cached_bytes)


def live_strategies(slice_: Slice) -> SliceStrategies[Never]:
    """Return what a server runs. KV rotates where the slice has host memory for it."""
    arena = arena_of(slice_)
    rotation = RotationSettings() if slice_.host_kv_bytes else None
    return SliceStrategies(arena, WeightMemory[Never](arena), rotation=rotation)
