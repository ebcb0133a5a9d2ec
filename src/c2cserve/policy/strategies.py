"""Where a request goes, by the strategy that a preset names (`presets.Placing`)."""

from collections.abc import Sequence

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.baselines.serverlessllm import place_by_limits, scatter
from c2cserve.policy.baselines.slinfer.consolidation import Placer
from c2cserve.policy.cluster.placement import Value, place
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad, expected_kv_bytes
from c2cserve.policy.presets import Preset


def place_by_preset(
    preset: Preset,
    placer: Placer,
    request: Request,
    spec: ModelSpec,
    loads: Sequence[SliceLoad],
    value: Value,
    now: float,
    *,
    late: bool,
) -> Placement | None:
    """Return where the request should go, of the open slices `loads`; None: nowhere now. `value`
    and `late`: see `placement.place`."""
    match preset.placing:
        case "c2cserve":
            kv_bytes = expected_kv_bytes(request, spec, placer.mean_output(spec.id))
            return place(request, spec, kv_bytes, loads, value, now, late=late)
        case "slinfer":
            return placer.place(request, spec, loads, now)
        case "limits":
            return place_by_limits(request, spec, loads, preset.limits)
        case "scatter":
            return scatter(request, loads, preset.seed, preset.share)
