"""The policies of a server, by name.

Ours are made here. Those of published systems are imported when a server is asked for one, so that
no other server runs any of their code."""

from dataclasses import replace

from c2cserve.core.actions import BaselineClusterAction, BaselineSliceAction
from c2cserve.core.machine import Slice
from c2cserve.core.policy_names import OWN
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.policy.slice.policy import SlicePolicy


def cluster_policy(name: str, settings: AdmissionSettings) -> ClusterPolicy[BaselineClusterAction]:
    """Build the controller's policy. Raises KeyError for a name that is none."""
    if name == OWN:
        return ClusterPolicy[BaselineClusterAction](settings)
    from c2cserve.policy.baselines.compose import live_cluster_policy

    return live_cluster_policy(name, settings)


def slice_policy(name: str, slice_: Slice, in_flight: int) -> SlicePolicy[BaselineSliceAction]:
    """Build the policy of one slice. Raises KeyError for a name that is none."""
    if name == OWN:
        return SlicePolicy[BaselineSliceAction](slice_, in_flight)
    from c2cserve.policy.baselines.compose import live_slice_policy

    return live_slice_policy(name, slice_, in_flight)


def admission_of(
    name: str, settings: AdmissionSettings, patience: float | None
) -> AdmissionSettings:
    """Return the settings of a server whose operator asks for this patience; None: for none."""
    if name == OWN:
        return settings if patience is None else replace(settings, patience=patience)
    from c2cserve.policy.baselines import compose
    from c2cserve.policy.baselines.presets import PRESETS

    return compose.admission_of(PRESETS[name], settings, patience)


def hybrid_alpha(name: str) -> float | None:
    """Return the alpha that GEMMs of GPU slices begin with; None: they are not hybrid. Raises
    KeyError for a name that is none."""
    if name == OWN:
        return None
    from c2cserve.policy.baselines.presets import PRESETS

    return PRESETS[name].hybrid_alpha


def relays_tokens(name: str) -> bool:
    """Whether the controller's policy is told of each token (`events.TokensSent`)."""
    return name == "slinfer"
