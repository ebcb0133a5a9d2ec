"""A controller's policy that a test drives by hand."""

from cluster_cases import request, spec

from c2cserve.core.actions import (
    ClusterAction,
    Dispatch,
    Load,
    Reject,
)
from c2cserve.core.events import (
    Arrived,
    ClusterEvent,
    ModelAdded,
    ModelLoaded,
    ModelUsable,
    PoolState,
    SliceUp,
)
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy


class Hand:
    """A controller that is told things one by one."""

    def __init__(
        self, *slices: Slice, models: str = "a", budget: int = 100, **limits: float
    ) -> None:
        self.policy = ClusterPolicy(AdmissionSettings(**limits))
        self.now = 0.0
        self.tell(PoolState(budget), *(SliceUp(one) for one in slices))
        for name in models:
            self.ready(spec(name))

    def tell(self, *events: ClusterEvent) -> list[ClusterAction]:
        for event in events:
            self.policy.apply(event)
        return list(self.policy.decide(self.now))

    def ready(self, *specs: ModelSpec) -> None:
        for one in specs:
            assert Load(one.id) in self.tell(ModelAdded(one))
            self.tell(ModelUsable(one.id), ModelLoaded(one.id, one.weight_bytes, 1.0))

    def arrive(self, *names: str, model: str = "a", ttft_s: float = 1.0) -> list[ClusterAction]:
        return self.tell(
            *(Arrived(request(name, model, self.now, ttft_s=ttft_s)) for name in names)
        )


def rejects(actions: list[ClusterAction]) -> dict[str, int]:
    return {a.request_id: a.status for a in actions if isinstance(a, Reject)}


def dispatched(actions: list[ClusterAction]) -> dict[str, str]:
    return {a.request_id: a.slice_id for a in actions if isinstance(a, Dispatch)}
