"""What the controller's policy is composed of: parts with more than one implementation.

                 a server                        simulations and baselines
    placing      `placement`, `link_and_memory`  the same, `baselines.placing`
    instances    kept, or read in place          `baselines.instances`

`ExtraT` is the type of the actions that these parts add to `actions.ClusterAction`. On a server
they add none, so its controller is never handed an action that it cannot carry out.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Never, Protocol, TypeVar

from c2cserve.core import events as ev
from c2cserve.core.actions import Activate, ClusterAction
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Request
from c2cserve.policy.cluster.link_and_memory import LINK_AND_MEMORY, stream_step_s
from c2cserve.policy.cluster.placement import Budgets, Value, place, place_owed
from c2cserve.policy.cluster.slice_load import (
    Instance,
    Outputs,
    Placement,
    SliceLoad,
    expected_kv_bytes,
)

ExtraT = TypeVar("ExtraT")
ExtraT_co = TypeVar("ExtraT_co", covariant=True)
Changed = ev.InstanceReady | ev.KvResized


class Placing(Protocol):
    @property
    def ours(self) -> bool:
        """Whether tenants get their shares of slices, suspects are isolated and idle slices steal.
        A request that waited is tried only where room was made since. Baselines do none of it."""
        ...

    @property
    def polls(self) -> bool:
        """Whether what waits is tried again at fixed intervals, whatever has changed."""
        ...

    def place(
        self, request: Request, spec: ModelSpec, loads: list[SliceLoad], value: Value, now: float,
        *, late: bool, runs: bool, owed_bytes: int,
    ) -> Placement | None:  # fmt: skip
        """Return where the request should go, of the open slices `loads`; None: nowhere now.
        `value`, `late`, `runs` and `owed_bytes`: see `placement.place`."""
        ...

    def place_owed(
        self, request: Request, spec: ModelSpec, loads: list[SliceLoad], value: Value, now: float
    ) -> Placement | None:
        """See `placement.place_owed`."""
        ...


class BudgetedPlacing(Placing):
    """`policy.cluster.placement`, within the budgets that are known of slices."""

    @property
    def ours(self) -> bool:
        return True

    @property
    def polls(self) -> bool:
        return False

    def __init__(
        self, mean_output: Callable[[str], float], budgets: Budgets = LINK_AND_MEMORY
    ) -> None:
        self._mean_output = mean_output
        self._budgets = budgets

    def place(
        self, request: Request, spec: ModelSpec, loads: list[SliceLoad], value: Value, now: float,
        *, late: bool, runs: bool, owed_bytes: int,
    ) -> Placement | None:  # fmt: skip
        kv_bytes = expected_kv_bytes(request, spec, self._mean_output(spec.id))
        return place(
            request, spec, kv_bytes, loads, value, now, late=late, runs=runs, owed_bytes=owed_bytes,
            budgets=self._budgets,
        )  # fmt: skip

    def place_owed(
        self, request: Request, spec: ModelSpec, loads: list[SliceLoad], value: Value, now: float
    ) -> Placement | None:
        return place_owed(request, spec, loads, value, now, self._budgets)


class InstanceRules(Generic[ExtraT_co]):
    """How instances begin, get memory and end. Here they share one arena, and stay until another
    model needs their place on the slice. Where a slice swaps weights, those of an instance are kept
    or stream (`link_and_memory`). Elsewhere they are read in place."""

    @property
    def wakeup(self) -> float | None:
        """When `expired` has to be asked again, in clock seconds."""
        return None

    def opened(self, slice_: Slice, load: SliceLoad) -> bool:
        """Note that a slice is up. Return whether it is used."""
        load.keeps = slice_.swaps_weights
        return True

    def start(
        self, load: SliceLoad, spec: ModelSpec, placement: Placement
    ) -> Sequence[ClusterAction | ExtraT_co]:
        """Make the model an instance of the slice."""
        keep = load.keeps and placement.keep
        streams = load.keeps and not keep
        step_s = stream_step_s(load, spec) if streams else 0.0
        load.activate(spec, ready=not keep, streams=streams, stream_step_s=step_s)
        return (Activate(spec.id, load.slice.id, keep),)

    def joined(
        self, load: SliceLoad, instance: Instance, placement: Placement
    ) -> Sequence[ClusterAction | ExtraT_co]:
        """Note that a request goes to an instance that is there."""
        return ()

    def preempt(self, request_id: str, slice_id: str) -> ExtraT_co:
        raise AssertionError(f"{request_id}: requests of a live slice are not preempted from here")

    def left(self, load: SliceLoad, instance: Instance) -> None:
        """Note that a request of the instance has left its slice."""

    def ended(self, load: SliceLoad, instance: Instance) -> Sequence[ClusterAction | ExtraT_co]:
        """Note that the instance was deactivated."""
        return ()

    def changed(
        self, load: SliceLoad, instance: Instance, event: Changed
    ) -> Sequence[ClusterAction | ExtraT_co]:
        """Note that the instance's weights or its KV's size have changed."""
        instance.ready = True  # nothing is resized here
        return ()

    def shrink(self, now: float) -> Sequence[ExtraT_co]:
        """Take back memory from instances that requests have left."""
        return ()

    def expired(self, now: float) -> Sequence[tuple[SliceLoad, Instance]]:
        """Return instances that have had no requests for long enough, and their slices. An instance
        or a slice may have ended since."""
        return ()


class Strategies(Generic[ExtraT_co]):
    def __init__(
        self, outputs: Outputs, placing: Placing, instances: InstanceRules[ExtraT_co]
    ) -> None:
        self.outputs, self.placing, self.instances = outputs, placing, instances


def live_strategies() -> Strategies[Never]:
    """Return what a server runs."""
    outputs = Outputs()
    return Strategies(outputs, BudgetedPlacing(outputs.mean), InstanceRules[Never]())
