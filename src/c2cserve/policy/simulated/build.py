"""Policies as presets describe them: what simulations run."""

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
from c2cserve.policy.baselines.slinfer.consolidation import Placer
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.policy.cluster.slice_load import Outputs
from c2cserve.policy.cluster.strategies import BudgetedPlacing, Strategies
from c2cserve.policy.simulated.lookahead import SwappingLookahead
from c2cserve.policy.simulated.presets import Chunks, Preset
from c2cserve.policy.slice.batching import BY_HEADROOM, PrefillBudget, headroom_budget
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.policy.slice.strategies import SliceStrategies, arena_of, swapping_of

SimulatedClusterPolicy = ClusterPolicy[SimulatedClusterAction]
SimulatedSlicePolicy = SlicePolicy[SimulatedSliceAction]

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
    outputs = Outputs()
    placer = Placer(preset, outputs.mean)
    ours = preset.placing == "c2cserve"
    placing = BudgetedPlacing(outputs.mean) if ours else BaselinePlacing(preset, placer)
    strategies: Strategies[SimulatedClusterAction] = Strategies(
        outputs, placing, PresetInstances(preset, placer)
    )
    return ClusterPolicy(settings, strategies)


def slice_policy(
    slice_: Slice, preset: Preset, lookahead: int, in_flight: int = 1
) -> SimulatedSlicePolicy:
    """Build one slice's policy. `lookahead`: decode steps that may be decided at once; 1: none.
    `in_flight`: steps at a time."""
    arena = arena_of(slice_)
    swapping = swapping_of(arena, slice_, rotates=preset.keeps)
    rotation = preset.rotation if slice_.host_kv_bytes else None
    by_headroom = preset.turn == "headroom"
    several = lookahead > 1 and in_flight == 1 and rotation is None and slice_.lanes == 1
    strategies: SliceStrategies[SimulatedSliceAction] = SliceStrategies(
        arena, swapping, _BUDGETS[preset.chunks], BY_HEADROOM if by_headroom else BY_ARRIVAL,
        preset.chunks == "whole", rotation,
        SwappingLookahead(lookahead, slice_.max_batch, arena, swapping, by_headroom=by_headroom)
        if several else None,
        AlphaBank() if preset.alpha else None,
    )  # fmt: skip
    return SlicePolicy(slice_, in_flight, strategies)
