"""Where a request goes, by the strategy that a preset names (`presets.Placing`)."""

from dataclasses import dataclass

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.baselines.aegaeon.placing import place_by_groups
from c2cserve.policy.baselines.presets import Preset
from c2cserve.policy.baselines.serverlessllm import place_by_limits, scatter
from c2cserve.policy.baselines.slinfer.consolidation import Placer
from c2cserve.policy.cluster.placement import Value
from c2cserve.policy.cluster.slice_load import Placement, SliceLoad


@dataclass(frozen=True, slots=True)
class BaselinePlacing:
    """`policy.cluster.strategies.Placing`."""

    preset: Preset
    placer: Placer

    @property
    def ours(self) -> bool:
        return False

    @property
    def polls(self) -> bool:
        """SLINFER's code tries what waits every 0.25 s, and so do the systems beside it there."""
        return self.preset.placing in ("slinfer", "limits")

    def place(
        self, request: Request, spec: ModelSpec, loads: list[SliceLoad], value: Value, now: float,
        *, late: bool, runs: bool, owed_bytes: int,
    ) -> Placement | None:  # fmt: skip
        match self.preset.placing:
            case "slinfer":
                return self.placer.place(request, spec, loads, now)
            case "limits":
                return place_by_limits(request, spec, loads, self.preset.limits)
            case "scatter":
                return scatter(request, loads, self.preset.seed, self.preset.share)
            case "groups":
                return place_by_groups(request, spec, loads, streams=self.preset.streams)
            case "c2cserve" | "streams":
                raise AssertionError("that is no baseline")

    def place_owed(
        self, request: Request, spec: ModelSpec, loads: list[SliceLoad], value: Value, now: float
    ) -> Placement | None:
        return None
