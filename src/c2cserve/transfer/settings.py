"""How transfers are cut and scheduled."""

from dataclasses import dataclass
from typing import Literal

from c2cserve.transfer.moves import Port

Order = Literal["direct", "longest"]
"""What a link takes next.

- direct: its own queue first, then relays for the longest other one.
- longest: the longest of all queues that it can carry, so that they end together.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """How transfers are cut and scheduled. Times are in seconds."""

    task_bytes: int = 5 << 20
    """The size of a micro-task between host memory and a GPU."""
    peer_task_bytes: int = 32 << 20
    """The size of a micro-task between GPUs, whose links are several times as fast."""
    depth: int = 2
    """Micro-tasks outstanding on a link at a time."""
    one_path_bytes: int = 12 << 20
    """Transfers up to this size take the direct path only, as one copy outside of the queues."""
    order: Order = "direct"
    stall_s: float = 0.05
    """A relay that takes longer is recalled, and its link relays no more for a while."""
    pause_s: float = 1.0
    """How long a link does not relay after its first stall. The time doubles with each stall."""
    slow: float = 1.5
    """A micro-task is slow that takes so many times as long as the link's fastest. After it, the
    link takes no background micro-task for as long as the slow one took: other traffic is there."""

    def __post_init__(self) -> None:
        if min(self.task_bytes, self.peer_task_bytes, self.depth) < 1:
            raise ValueError("micro-tasks have 1 byte or more, and links a depth of 1 or more")

    def task_bytes_of(self, port: Port) -> int:
        return self.peer_task_bytes if port.direction == "peer" else self.task_bytes
