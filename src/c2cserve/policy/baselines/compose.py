"""Policies as presets describe them, for servers and for simulations.

The preset `C2CSERVE` is not composed here: it is what `live_strategies` returns."""

from dataclasses import replace
from operator import attrgetter
from typing import Never

from c2cserve.core.actions import BaselineClusterAction, BaselineSliceAction
from c2cserve.core.machine import Slice
from c2cserve.policy.baselines.aegaeon.memory import TurnSwapping
from c2cserve.policy.baselines.c2cserve.alpha import AlphaBank
from c2cserve.policy.baselines.c2cserve.chunk_budgets import (
    ProfiledChunks,
    fixed_budget,
    whole_budget,
)
from c2cserve.policy.baselines.c2cserve.streaming import STREAMS_ONLY
from c2cserve.policy.baselines.instances import PresetInstances
from c2cserve.policy.baselines.placing import BaselinePlacing
from c2cserve.policy.baselines.presets import C2CSERVE, PRESETS, Chunks, Preset
from c2cserve.policy.baselines.slinfer.consolidation import Placer
from c2cserve.policy.cluster import strategies as cluster
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.policy.cluster.slice_load import Outputs
from c2cserve.policy.slice import strategies as slices
from c2cserve.policy.slice.batching import BY_HEADROOM, PrefillBudget, headroom_budget
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.policy.weights.weight_memory import WeightMemory

BaselineClusterPolicy = ClusterPolicy[BaselineClusterAction]

BY_ARRIVAL = attrgetter("request.arrival_s")
_NEVER_S = 1e9
"""A burst that never becomes an overload. (A record has no infinity.)"""

_BUDGETS: dict[Chunks, PrefillBudget] = {
    "headroom": headroom_budget,
    "fixed": fixed_budget,
    "whole": whole_budget,
}


def admission_of(
    preset: Preset, settings: AdmissionSettings, patience: float | None = None
) -> AdmissionSettings:
    """Return the settings with what the preset replaces. `patience` replaces the preset's."""
    if preset.patience is None:
        return settings if patience is None else replace(settings, patience=patience)
    patience = preset.patience if patience is None else patience
    return replace(settings, patience=patience, foresee=False, burst_s=_NEVER_S)


def cluster_strategies(preset: Preset) -> cluster.Strategies[BaselineClusterAction]:
    if preset == C2CSERVE:
        return cluster.live_strategies()
    outputs = Outputs()
    placer = Placer(preset, outputs.mean)
    placing: cluster.Placing = BaselinePlacing(preset, placer)
    if preset.placing == "c2cserve":
        placing = cluster.BudgetedPlacing(outputs.mean)
    elif preset.placing == "streams":
        placing = cluster.BudgetedPlacing(outputs.mean, STREAMS_ONLY)
    return cluster.Strategies(outputs, placing, PresetInstances(preset, placer))


def slice_strategies(slice_: Slice, preset: Preset) -> slices.SliceStrategies[Never]:
    if preset == C2CSERVE:
        return slices.live_strategies(slice_)
    arena = slices.arena_of(slice_)
    table = ProfiledChunks() if preset.chunks == "smallest" else None
    return slices.SliceStrategies(
        arena, _memory_of(arena, slice_, preset), table or _BUDGETS[preset.chunks],
        BY_HEADROOM if preset.turn == "headroom" else BY_ARRIVAL, preset.chunks == "whole",
        preset.rotation if slice_.host_kv_bytes else None, chunk_table=table,
    )  # fmt: skip


def _memory_of(arena: KvArena, slice_: Slice, preset: Preset) -> WeightMemory:
    if preset.turn == "quota":
        return TurnSwapping(arena, slice_)
    if not slice_.swaps_weights:
        return WeightMemory(arena)
    return slices.swapping_of(arena, slice_, rotates=preset.keeps)


def live_cluster_policy(name: str, settings: AdmissionSettings) -> BaselineClusterPolicy:
    """Build the controller's policy of a server. `settings` are what `admission_of` returned."""
    return ClusterPolicy(settings, cluster_strategies(PRESETS[name]))


def live_slice_policy(name: str, slice_: Slice, in_flight: int) -> SlicePolicy[BaselineSliceAction]:
    """Build one slice's policy of a server."""
    preset = PRESETS[name]
    strategies: slices.SliceStrategies[BaselineSliceAction] = slice_strategies(slice_, preset)
    if preset.alpha and preset.hybrid_alpha is not None:
        strategies = replace(strategies, gemm_control=AlphaBank())
    return SlicePolicy(slice_, in_flight, strategies)
