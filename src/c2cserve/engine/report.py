"""What an executor tells its slice's loop: outcomes as they come, and its state when polled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from c2cserve.core.events import SliceEvent
from c2cserve.core.request import Delta, Job

Report = Callable[[SliceEvent | None, Sequence[Delta]], None]
"""Takes an event for the policy (or None) together with the deltas for clients that belong to it.
One call ends a step: its deltas and its `StepDone`."""


@dataclass(frozen=True, slots=True)
class ExecutorState:
    computing: bool
    """A step is under way that is not parked."""
    parked: bool
    """A step waits for weights that are being loaded into the pool."""
    renewals: int
    """How often operators' state was built anew after a failed step."""
    prepared: list[Job]
    """Requests that can be added now."""
