"""State that all slices of a simulated machine share, and the counters of each slice."""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from c2cserve.core import events as ev
from c2cserve.core.step import Lane, Step
from c2cserve.sim.world.checks import SeqState
from c2cserve.sim.world.costs import Costs
from c2cserve.sim.world.links import Network
from c2cserve.sim.world.loop import LoopScheduler
from c2cserve.sim.world.requests import TrackedRequest
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.timeline import Timeline


class Controller(Protocol):
    """The part of the machine that a slice notifies."""

    def notify(self, event: ev.ClusterEvent) -> None: ...

    def finished(self, tracked: TrackedRequest) -> None: ...

    def truncated(self, tracked: TrackedRequest) -> None: ...

    def dropped(self, tracked: TrackedRequest) -> None: ...

    def returned(self, tracked: TrackedRequest) -> None: ...


class ComputingSlice(Protocol):
    """A slice as its lanes notify it."""

    def lasting(self, lane: Lane, step: Step, alone_s: float) -> float:
        """Return the seconds of a step that begins now, but for its link. `alone_s`: those that it
        takes alone, and with all of its kernels launched."""
        ...

    def finished(self, seq: SeqState) -> None:
        """Note that a sequence has all its output, before the policy is notified of the step's
        end."""
        ...

    def step_over(self, event: ev.SliceEvent) -> None:
        """Notify the policy of a step's end, or of what was measured of it."""
        ...


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """State that all slices of a machine share."""

    timeline: Timeline
    loops: LoopScheduler
    network: Network
    costs: Costs
    models: dict[str, SimModel]
    controller: Controller
    random: Random
    noise: float
    """Standard deviation of the logarithm of a step's time."""
    hybrid: float | None
    """The alpha that GEMMs begin with, if they are C2CServe's (`sim.world.costs`)."""


@dataclass(slots=True)
class SliceUse:
    """Counters of a slice, in seconds, counts and bytes."""

    busy_s: float = 0.0
    """A step ran."""
    used_s: float = 0.0
    """It had requests."""
    held_s: float = 0.0
    """It had instances."""
    steps: int = 0
    tokens: int = 0
    switches: int = 0
    loads: int = 0
    streamed_bytes: float = 0.0
    moved_bytes: int = 0
    """KV moved between the slice and the host."""
    prefix_bytes: int = 0
    """KV of cached prefixes brought from the host."""
    compute_s: float = 0.0
    memory_s: float = 0.0
    link_s: float = 0.0
    """Time of steps by what set their duration: arithmetic, the slice's own memory, or the link.
    The sum is the time of all steps that have ended."""
    kv_byte_s: float = 0.0
    """Bytes of KV that were held while steps ran, times seconds."""
