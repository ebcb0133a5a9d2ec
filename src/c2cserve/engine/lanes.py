"""The lanes of a slice: what computes in each, and which steps are launched there.

resident     [ 3B | 3B | 3B | 3B | 3B | 3B | 3B | 3B ]     steps of a lane end in their order,
streaming    [ 8B ................................. ]     those of two lanes in any order
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from c2cserve.core.step import Lane
from c2cserve.engine.models.decoder import ForwardBatch
from c2cserve.engine.run import Run
from c2cserve.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What computes the steps of one lane. Nothing of it is shared with another lane."""

    ops: Ops
    to_device: Callable[[ForwardBatch], ForwardBatch] | None = None
    """Moves a batch from the host to where the operators read it. None: that is the host."""
    current: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes what is launched within its context this lane's."""
    attached: Callable[[], None] = lambda: None
    """Is called when the calling thread has made what a model keeps on the device."""


@dataclass(slots=True)
class LaneSteps:
    """A lane, and its steps from their launch to their outcome, in that order."""

    parts: LaneParts
    launched: deque[Run] = field(default_factory=deque[Run])
    collected_s: float = 0.0
    """When the last outcome was collected."""
    last_model: str = ""


def lanes_of(resident: LaneParts, streaming: LaneParts | None) -> dict[Lane, LaneSteps]:
    """Return a slice's lanes, one or two."""
    lanes: dict[Lane, LaneSteps] = {"resident": LaneSteps(resident)}
    if streaming is not None:
        lanes["streaming"] = LaneSteps(streaming)
    return lanes
