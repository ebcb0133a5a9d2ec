"""What a slice's policy is composed of: parts with more than one implementation.

                    a live slice                    simulations and baselines
    memory          `weights.weight_swapping`,      the same
                    or weights are read in place
    prefill_budget  `batching.headroom_budget`      `baselines.c2cserve.chunk_budgets`
    rank            least headroom first            order of arrival
    whole_prompts   no: urgent ones go between      as published systems compute prompts
    lookahead       none: one step per decision     `sim.policies.lookahead`
    gemm_control    none                            `baselines.c2cserve.alpha`
    chunk_table     none                            `baselines.c2cserve.chunk_budgets`

`ExtraT` is the type of the actions that these parts add to `actions.SliceAction`. Ours adds none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Never, Protocol, TypeVar

from c2cserve.core.events import ChunksProfiled, GemmsMeasured
from c2cserve.core.machine import Slice
from c2cserve.policy.slice.batching import (
    BY_HEADROOM,
    PrefillBudget,
    Seq,
    headroom_budget,
)
from c2cserve.policy.slice.in_flight import Lookahead
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.slice.rotation import PACED, RotationSettings
from c2cserve.policy.weights.weight_memory import WeightMemory
from c2cserve.policy.weights.weight_room import CACHE_SHARE
from c2cserve.policy.weights.weight_swapping import WeightSwapping

ExtraT = TypeVar("ExtraT")
ExtraT_co = TypeVar("ExtraT_co", covariant=True)


class GemmControl(Protocol[ExtraT_co]):
    """Adjusts how GEMMs are computed, by what was measured of them."""

    def sample(self, event: GemmsMeasured, budget_s: float) -> Sequence[ExtraT_co]: ...


class ChunkTable(Protocol):
    """Knows the chunks of models in advance."""

    def take(self, event: ChunksProfiled) -> None: ...


@dataclass(frozen=True, slots=True)
class SliceStrategies(Generic[ExtraT_co]):
    arena: KvArena
    memory: WeightMemory
    prefill_budget: PrefillBudget = headroom_budget
    rank: Callable[[Seq], float] = BY_HEADROOM
    whole_prompts: bool = False
    """See `batching.ActiveModel`."""
    rotation: RotationSettings | None = None
    """None: KV stays in the arena, and preempted requests begin again."""
    prefixes: bool = False
    """Cached prefixes stay in host memory too, where KV rotates (`policy.slice.prefix_tier`)."""
    lookahead: Lookahead | None = None
    gemm_control: GemmControl[ExtraT_co] | None = None
    chunk_table: ChunkTable | None = None


def arena_of(slice_: Slice) -> KvArena:
    """Return the empty arena of a slice. On GPUs, what KV leaves of it is for weights, which are
    worth more than prefixes that may be asked for again."""
    arena = KvArena(slice_.kv_bytes, slice_.slab_bytes)
    if slice_.gpu is not None:
        arena.limit_cache(CACHE_SHARE)
    return arena


def swapping_of(arena: KvArena, slice_: Slice, *, rotates: bool) -> WeightSwapping:
    """Return the rules of weights that are kept in a slice's memory.

    Where KV may have all of that memory, weights lie at its end, in what KV leaves."""
    arena.weights_above = slice_.swaps_weights and slice_.kv_bytes >= slice_.hbm_bytes
    return WeightSwapping(arena, slice_, rotates=rotates)


def live_steps_in_flight(slice_: Slice) -> int:
    """Return how many steps of a slice a server has in flight. A GPU's next step is launched while
    one runs. A CPU slice computes its steps on the thread that plans them."""
    return 1 if slice_.gpu is None else 2


def live_strategies(slice_: Slice) -> SliceStrategies[Never]:
    """Return what a server runs. Weights are swapped where memory and link are known. KV rotates,
    and cached prefixes stay, where the slice has host memory for it."""
    arena = arena_of(slice_)
    memory = WeightMemory(arena)
    if slice_.swaps_weights:
        memory = swapping_of(arena, slice_, rotates=True)
    rotation = PACED if slice_.host_kv_bytes else None
    return SliceStrategies(arena, memory, rotation=rotation, prefixes=rotation is not None)
