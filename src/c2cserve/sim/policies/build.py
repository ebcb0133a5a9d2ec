"""The policies of a simulation: what a preset composes, with what only simulations have.

What a simulation adds changes no decision (`lookahead`), or needs GEMMs that a server reports of
(alpha)."""

from dataclasses import replace

from c2cserve.core.actions import BaselineClusterAction, BaselineSliceAction
from c2cserve.core.machine import Slice
from c2cserve.policy.baselines.c2cserve.alpha import AlphaBank
from c2cserve.policy.baselines.compose import admission_of, cluster_strategies, slice_strategies
from c2cserve.policy.baselines.presets import Preset
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.policy.slice.strategies import SliceStrategies
from c2cserve.sim.policies.lookahead import Lookahead

SimulatedClusterPolicy = ClusterPolicy[BaselineClusterAction]
SimulatedSlicePolicy = SlicePolicy[BaselineSliceAction]


def cluster_policy(settings: AdmissionSettings, preset: Preset) -> SimulatedClusterPolicy:
    """Build the controller's policy."""
    return ClusterPolicy(admission_of(preset, settings), cluster_strategies(preset))


def slice_policy(
    slice_: Slice, preset: Preset, lookahead: int, in_flight: int = 1, *, hybrid: bool = False
) -> SimulatedSlicePolicy:
    """Build one slice's policy. `lookahead`: decode steps that may be decided at once; 1: none.
    `in_flight`: steps at a time. `hybrid`: GEMMs have an alpha, which the preset may control."""
    strategies: SliceStrategies[BaselineSliceAction] = slice_strategies(slice_, preset)
    single = slice_.lanes == 1 and strategies.rotation is None and preset.turn != "quota"
    if lookahead > 1 and in_flight == 1 and single:
        by_headroom = preset.turn == "headroom"
        several = Lookahead(lookahead, slice_.max_batch, strategies, by_headroom=by_headroom)
        strategies = replace(strategies, lookahead=several)
    if hybrid and preset.alpha:
        strategies = replace(strategies, gemm_control=AlphaBank())
    return SlicePolicy(slice_, in_flight, strategies)
