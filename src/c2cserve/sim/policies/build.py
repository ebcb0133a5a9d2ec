"""Policies as presets describe them.

The preset `C2CSERVE` is not composed here: it is what `live_strategies` returns to a server. What a
simulation adds to it changes no decision (`lookahead`), or needs GEMMs that no server runs (alpha).
"""

from dataclasses import replace
from math import inf
from operator import attrgetter

from c2cserve.core.actions import SimulatedClusterAction, SimulatedSliceAction
from c2cserve.core.machine import Slice
from c2cserve.policy.baselines.c2cserve.alpha import AlphaBank
from c2cserve.policy.baselines.c2cserve.chunk_budgets import (
    fixed_budget,
    smallest_budget,
    whole_budget,
)
from c2cserve.policy.baselines.instances import PresetInstances
from c2cserve.policy.baselines.placing import BaselinePlacing
from c2cserve.policy.baselines.presets import C2CSERVE, Chunks, Preset
from c2cserve.policy.baselines.slinfer.consolidation import Placer
from c2cserve.policy.cluster import strategies as cluster
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.policy.cluster.slice_load import Outputs
from c2cserve.policy.slice import strategies as slices
from c2cserve.policy.slice.batching import BY_HEADROOM, PrefillBudget, headroom_budget
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.sim.policies.lookahead import Lookahead

SimulatedClusterPolicy = ClusterPolicy[SimulatedClusterAction]
SimulatedSlicePolicy = SlicePolicy[SimulatedSliceAction]
SimulatedStrategies = slices.SliceStrategies[SimulatedSliceAction]

BY_ARRIVAL = attrgetter("request.arrival_s")

_BUDGETS: dict[Chunks, PrefillBudget] = {
    "headroom": headroom_budget,
    "smallest": smallest_budget,
    "fixed": fixed_budget,
    "whole": whole_budget,
}


def cluster_policy(settings: AdmissionSettings, preset: Preset) -> SimulatedClusterPolicy:
    """Build the controller's policy."""
    if preset.patience is not None:
        settings = replace(settings, patience=preset.patience, foresee=False, burst_s=inf)
    return ClusterPolicy(settings, _cluster_strategies(preset))


def _cluster_strategies(preset: Preset) -> cluster.Strategies[SimulatedClusterAction]:
    if preset == C2CSERVE:
        return cluster.live_strategies()
    outputs = Outputs()
    placer = Placer(preset, outputs.mean)
    ours = preset.placing == "c2cserve"
    placing = cluster.BudgetedPlacing(outputs.mean) if ours else BaselinePlacing(preset, placer)
    return cluster.Strategies(outputs, placing, PresetInstances(preset, placer))


def slice_policy(
    slice_: Slice, preset: Preset, lookahead: int, in_flight: int = 1, *, hybrid: bool = False
) -> SimulatedSlicePolicy:
    """Build one slice's policy. `lookahead`: decode steps that may be decided at once; 1: none.
    `in_flight`: steps at a time. `hybrid`: GEMMs have an alpha, which the preset may control."""
    strategies = _slice_strategies(slice_, preset)
    single = slice_.lanes == 1 and strategies.rotation is None
    if lookahead > 1 and in_flight == 1 and single:
        by_headroom = preset.turn == "headroom"
        several = Lookahead(lookahead, slice_.max_batch, strategies, by_headroom=by_headroom)
        strategies = replace(strategies, lookahead=several)
    if hybrid and preset.alpha:
        strategies = replace(strategies, gemm_control=AlphaBank())
    return SlicePolicy(slice_, in_flight, strategies)


def _slice_strategies(slice_: Slice, preset: Preset) -> SimulatedStrategies:
    if preset == C2CSERVE:
        return slices.live_strategies(slice_)
    arena = slices.arena_of(slice_)
    return slices.SliceStrategies(
        arena, slices.swapping_of(arena, slice_, rotates=preset.keeps), _BUDGETS[preset.chunks],
        BY_HEADROOM if preset.turn == "headroom" else BY_ARRIVAL, preset.chunks == "whole",
        preset.rotation if slice_.host_kv_bytes else None,
    )  # fmt: skip
